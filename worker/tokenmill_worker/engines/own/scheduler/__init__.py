"""Plans what each step computes and applies its result to the sequences; plain Python.

Belongs here: the queue, admission, budgets, preemption, commit. Which block holds what belongs to
`kv`; how a plan is executed belongs to `execution`.
"""

from tokenmill_worker.engines.own.scheduler.lookahead import Lookahead
from tokenmill_worker.engines.own.scheduler.scheduler import Scheduler

__all__ = ["Lookahead", "Scheduler"]
