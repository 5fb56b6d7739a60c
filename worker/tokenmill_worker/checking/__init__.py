"""Checks finished answers against the JSON schemas of their requests, in a process of its own."""

from tokenmill_worker.checking.checker import VIOLATION, AnswerChecker
from tokenmill_worker.checking.checks import Checks

__all__ = ["VIOLATION", "AnswerChecker", "Checks"]
