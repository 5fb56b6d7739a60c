"""The commands of `tokenmill`, one module a group.

Belongs here: arguments and what a command calls. What it draws belongs to `views`.
"""
