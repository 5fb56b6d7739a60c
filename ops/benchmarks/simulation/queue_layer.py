"""One queue server and many workers, as events in virtual time: when does the server become the limit?

The server is one thread that serves scripts one after the other. Each worker ends a step every so often
and sends one append for all its sequences; it does not wait for the reply, but has only one append under
way, so that a slow server shows as late tokens first and as slow workers then.
"""

import heapq
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScriptCosts:
    """Seconds of the server's thread, as `calibrate` measures them on the real one."""

    append_call: float
    append_chunk: float
    job: float  # submit, claim and finish of one job together


@dataclass(frozen=True, slots=True)
class Load:
    """What one worker does. `tokens_per_chunk` above 1: chunks are gathered, or only checkpoints are logged."""

    step_s: float
    num_sequences: int
    mean_answer: float
    tokens_per_chunk: float = 1.0


@dataclass(frozen=True, slots=True)
class QueueResult:
    num_workers: int
    utilisation: float  # of the server's thread
    speed: float  # share of the tokens per second that the workers' devices could give
    added_s: tuple[float, ...]  # per append: from the end of the step to the publication


def simulate(num_workers: int, load: Load, costs: ScriptCosts, num_steps: int = 300, seed: int = 0) -> QueueResult:
    """Steps vary by a fifth either way, so that the workers do not stay in step with one another."""
    source = random.Random(seed)
    chunks = load.num_sequences / load.tokens_per_chunk
    jobs = load.num_sequences / load.mean_answer  # that end, and are replaced, per step
    service = costs.append_call + costs.append_chunk * chunks + costs.job * jobs
    events = [(load.step_s * (1 + worker / num_workers), worker) for worker in range(num_workers)]
    heapq.heapify(events)
    done_steps = [0] * num_workers
    server_free = busy = now = 0.0
    added = []
    while events:
        now, worker = heapq.heappop(events)
        server_free = max(now, server_free) + service
        busy += service
        added.append(server_free - now)
        # The next step runs meanwhile; it counts as ended late only where the previous append is still under way.
        next_end = max(now + load.step_s * source.uniform(0.8, 1.2), server_free)
        done_steps[worker] += 1
        if done_steps[worker] < num_steps:
            heapq.heappush(events, (next_end, worker))
    total = max(server_free, now)
    return QueueResult(
        num_workers=num_workers,
        utilisation=busy / total,
        speed=sum(done_steps) * load.step_s / (num_workers * total),
        added_s=tuple(added),
    )
