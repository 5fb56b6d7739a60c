"""Builds every causal family of the installed Transformers small, and compares it with `generate`.

It is for development: the worker imports nothing from here.
"""
