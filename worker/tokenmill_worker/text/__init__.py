"""Converts between text and tokens on both sides of the engine.

Belongs here: tokenizer, chat template, incremental detokenisation, stop strings, and the growing
output of a job. Queues, chunks and the engine do not belong here.
"""
