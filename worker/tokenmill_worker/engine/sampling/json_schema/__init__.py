"""Rewrites JSON schemas (draft 2020-12 and earlier ones) for the grammar compiler."""

from tokenmill_worker.engine.sampling.json_schema.drafts import InvalidSchema, Modern, modern
from tokenmill_worker.engine.sampling.json_schema.rewrite import MAX_DEPTH, Rewritten, rewrite

__all__ = ["MAX_DEPTH", "InvalidSchema", "Modern", "Rewritten", "modern", "rewrite"]
