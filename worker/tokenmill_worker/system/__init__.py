"""Asks the operating system: a process ends with its parent, and leaves no directory behind."""
