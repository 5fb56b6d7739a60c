"""Runs the engine in a process or a thread of its own, and talks to it from asyncio.

Belongs here: the host, the child, and the frames between them. Their messages belong to
`tokenmill_worker.contract`, and an engine to its own package.
"""
