"""Reads and writes OpenAI's batch files: input lines, request bodies, output lines and files.

Belongs here: bytes to values and back. When a line is submitted belongs to `bulk`.
"""
