"""Plans what each step computes and applies its result to the sequences; plain Python."""

from tokenmill_worker.engine.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
