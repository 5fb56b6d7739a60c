"""An in-memory queue for the tests of a backend.

Belongs here: the queue and its scripted answers. No worker, server or model is needed.
"""

from tokenmill.testing.answers import Answer, failure
from tokenmill.testing.queue import InMemoryQueue

__all__ = ["Answer", "InMemoryQueue", "failure"]
