"""JSON schemas (draft 2020-12) as the grammar compiler reads them. Plain Python."""

from worker.engine.sampling.json_schema.rewrite import MAX_DEPTH, Rewritten, rewrite

__all__ = ["MAX_DEPTH", "Rewritten", "rewrite"]
