"""Appends the chunks of one step with a single call: the batch, and the connection that sends it.

Belongs here: the encoding of the call and its reply. What a chunk holds belongs to `publish`.
"""
