"""Brings jobs from the Redis queue into the worker, and makes every write that a lease allows.

Belongs here: claims, leases, control messages, validation of requests, and the scripts that the
server runs. Chunks are cut in `publish`, and results are stored in `record`.
"""
