"""Turns a claimed job into the engine's requests, or refuses it with one sentence.

Belongs here: parameters and their defaults, the encoding of prompts, what a job's log already
holds, and what the served model can do. Nothing here speaks with a server.
"""
