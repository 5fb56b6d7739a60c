"""Runs the engine in a process or a thread of its own, and talks to it from asyncio.

Belongs here: the host, the child, their messages and the frames between them. The engine itself
does not.
"""
