"""Requests before and after scheduling: validated, waiting for a grammar or adapter, collected.

Belongs here: what happens to one request outside of a step, and the calls for direct use. Which
sequence computes what belongs to `scheduler`.
"""
