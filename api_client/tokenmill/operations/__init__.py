"""Implements each call of a client without IO: generators yield IO requests and receive the
replies.

Belongs here: requests, records, the order of tokens. Sockets belong to `transport`, threads and
tasks to the clients.
"""
