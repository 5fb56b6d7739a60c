"""The block copies of one step, and what to settle once it has succeeded or to take back if it fails."""

from dataclasses import dataclass, field

from worker.engine.plan import BlockCopy
from worker.engine.sequence import Sequence


@dataclass(slots=True)
class StepMoves:
    """Filled while a step is planned; lives until the step is committed or abandoned.

    `kept` are evicted prefix blocks that the step writes to the host, `pinned` those it reads from there,
    `leaving` a preempted sequence's host blocks that are read for the last time. `lifting` are device blocks
    whose fence falls with the step. `arrived` are sequences that have blocks from the host by this step's copies.
    """

    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    kept: list[tuple[int, bytes]] = field(default_factory=list)  # (group, hash)
    pinned: list[tuple[int, int]] = field(default_factory=list)  # (group, host block)
    leaving: list[tuple[int, int]] = field(default_factory=list)  # (group, host block)
    lifting: list[tuple[int, int, Sequence]] = field(default_factory=list)  # (group, block, owner)
    arrived: list[Sequence] = field(default_factory=list)
    offloaded: list[Sequence] = field(default_factory=list)
    is_counted: bool = False  # the tokens it samples are in its sequences' num_inflight
