"""Runs the parts of a service on one private machine: a Valkey server, child processes, `tokenmill
dev`, `doctor`.

Belongs here: what a developer starts for a while. What runs in production belongs to the other
rooms.
"""
