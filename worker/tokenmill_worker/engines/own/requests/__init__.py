"""Requests before scheduling: validated, or waiting for a grammar or an adapter.

Belongs here: what happens to one request outside of a step. Which sequence computes what belongs to
`scheduler`; results for callers in the same process belong to `direct`.
"""
