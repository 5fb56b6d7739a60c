"""Converts between text and tokens on both sides of the engine.

Belongs here: tokenizer, chat template, thoughts, incremental detokenisation, stop strings, and the
growing output of a job. Queues, chunks and the engine's work do not belong here.
"""
