"""Checks a GPU machine in one call: a chain of stages, one log for each, one table at the end."""
