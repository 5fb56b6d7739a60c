"""Checks finished answers against the JSON schemas of their requests, in a process of its own.

Belongs here: the process, its limits, and what a violation does to a job. Constraining the engine
to a schema while it generates belongs to the engine.
"""

from tokenmill_worker.checking.checker import VIOLATION, AnswerChecker
from tokenmill_worker.checking.checks import Checks

__all__ = ["VIOLATION", "AnswerChecker", "Checks"]
