"""Serves a model that is computed from the tokens alone, for load, chaos and queue measurements.

Everything but the forward pass is our own engine: its scheduler, its cache's bookkeeping, its loop.
Belongs here: the runner, the options of a model's name, the tokenizer's files.
"""
