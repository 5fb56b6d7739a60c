"""The engine used directly, with the calls of Transformers' continuous batching, from any thread.

Belongs here: the manager with its thread, the results that it collects, and a model with
`generate_batch`. The engine in a process of its own belongs to `serve`.
"""
