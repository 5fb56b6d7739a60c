"""Serves this engine to a worker: loads it, then takes commands and reports between steps."""

from tokenmill_worker.engines.own.serve.serving import serve, serve_loaded

__all__ = ["serve", "serve_loaded"]
