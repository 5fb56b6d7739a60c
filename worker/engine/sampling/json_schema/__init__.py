"""Rewrites JSON schemas (draft 2020-12) for the grammar compiler, in plain Python."""

from worker.engine.sampling.json_schema.rewrite import MAX_DEPTH, Rewritten, rewrite

__all__ = ["MAX_DEPTH", "Rewritten", "rewrite"]
