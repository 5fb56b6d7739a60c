"""Draws on the terminal for the commands.

Belongs here: lines, tables and live displays. Nothing here submits or changes a job.
"""
