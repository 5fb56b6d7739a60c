"""Loads and describes Transformers models: layers, files, paged attention, replaceable modules.

Belongs here: what holds for a model on any device. Replacements belong to `cpu` and `cuda`.
"""
