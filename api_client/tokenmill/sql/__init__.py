"""Reads results, usage and webhooks from SQL; engines are opened here and nowhere else.

Belongs here: queries of a client. The tables stand in `tokenmill_schemas.tables`; rows are written
by the worker.
"""

from tokenmill.sql.results import GROUPINGS, Grouping, JobRow, SqlResults, UsageRow

__all__ = ["GROUPINGS", "Grouping", "JobRow", "SqlResults", "UsageRow"]
