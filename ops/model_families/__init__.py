"""Every causal family of the installed Transformers, built small and held against `generate`.

It belongs to development: the worker imports nothing from here.
"""
