"""Requests before and after scheduling: validated, waiting for a grammar or an adapter, collected as outputs.

Belongs here: what happens to one request outside of a step. Which sequence computes what belongs to `scheduler`.
"""
