"""Defines what worker and engine agree on: requests, events, the messages between them, a host.

Every engine serves this room, and the worker's stages know it alone. It imports no torch, no
numpy, no Redis and no SQL.
"""
