"""Turns the engine's events into chunks of text, in each job's log and on its channel.

Belongs here: when and how an answer is cut into chunks, and sending them again after a failure. The
text itself is made in `text`; the script call is made in `queue`.
"""
