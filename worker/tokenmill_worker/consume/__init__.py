"""Takes jobs from the Redis queue into the worker: claims, leases, control messages, admission, and
every write that a lease allows.
"""
