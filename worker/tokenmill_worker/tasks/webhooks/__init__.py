"""Delivers the end of a job to its webhook: the outbox in SQL, the signed request, the addresses
that are allowed.

Belongs here: delivery. What a webhook message contains belongs to `tokenmill_schemas`.
"""
