"""Connections, pub/sub and script calls over redis-py.

Belongs here: how bytes reach the server and come back, also after a failover. What they mean
belongs to `operations`.
"""
