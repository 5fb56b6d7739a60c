"""Rewrites JSON schemas (draft 2020-12 and earlier ones) for the grammar compiler.

Belongs here: schema to schema. Grammars and token masks belong to `sampling.grammar`.
"""

from tokenmill_worker.engines.own.sampling.grammar.json_schema.drafts import (
    InvalidSchema,
    Modern,
    modern,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema.references import MAX_DEPTH
from tokenmill_worker.engines.own.sampling.grammar.json_schema.rewrite import Rewritten, rewrite

__all__ = ["MAX_DEPTH", "InvalidSchema", "Modern", "Rewritten", "modern", "rewrite"]
