"""Lets a backend that uses Celery run a generation as one of its tasks.

Belongs here: the task and its values. Everything else goes through `Client`.
"""

from tokenmill.celery.task import GenerationResult, GenerationTask, generation_task
from tokenmill.celery.values import GenerationFailed

__all__ = ["GenerationFailed", "GenerationResult", "GenerationTask", "generation_task"]
