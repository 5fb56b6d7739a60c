"""Stores batches and their progress, in SQL or in Redis.

Belongs here: the records of a batch. What a batch does belongs to `bulk`.
"""
