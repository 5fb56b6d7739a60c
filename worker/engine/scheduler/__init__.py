"""What the next step computes, and what its result means: policy in plain Python."""

from worker.engine.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
