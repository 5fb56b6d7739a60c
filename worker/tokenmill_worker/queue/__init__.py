"""Speaks with the server of the queue, and makes every write that a lease allows.

Belongs here: claims, leases, control messages, the log of chunks, the end of a job, and the scripts
that the server runs. Chunks are cut in `publish`, and results are stored in `record`.
"""
