"""Checks and writes the repository: house rules, environment, the reference pages."""
