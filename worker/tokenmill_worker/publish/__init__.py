"""Turns the engine's events into chunks of text, in each job's log and on its channel."""
