"""Shows in one call what a lent GPU does: a chain of stages, a log each, one table at the end."""
