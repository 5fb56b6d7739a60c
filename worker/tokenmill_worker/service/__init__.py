"""Passes each job of the running worker from stage to stage, and decides what happens when a part
fails.

What a stage does with a job is not here: claiming, generating, publishing and recording stand in
rooms of their own.
"""

from tokenmill_worker.service.service import Service

__all__ = ["Service"]
