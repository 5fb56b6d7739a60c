"""Attention backends for CUDA devices; the contract stands in `engine.attention.base`.

Belongs here: Triton, FlashAttention and what they share. The choice by name belongs to
`engine.attention.registry`.
"""
