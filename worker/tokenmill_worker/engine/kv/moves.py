"""The block copies of one step, and what to settle when it succeeds or undo when it fails."""

from dataclasses import dataclass, field

from tokenmill_worker.engine.plan import BlockCopy
from tokenmill_worker.engine.sequence import Sequence


@dataclass(slots=True)
class StepMoves:
    """The moves of one step: filled while it is planned, kept until it is committed or abandoned.

    - `kept`: hashes of evicted prefix blocks that the step copies to the host.
    - `pinned`: host blocks that the step reads or writes.
    - `leaving`: host blocks of returning sequences, read for the last time.
    - `lifting`: device blocks whose fence is lifted when the step succeeds.
    - `arrived`: sequences with blocks that this step copies from the host.
    - `offloaded`: sequences whose blocks this step copies to the host.
    """

    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    kept: list[tuple[int, bytes]] = field(default_factory=list)  # (group, hash)
    pinned: list[tuple[int, int]] = field(default_factory=list)  # (group, host block)
    leaving: list[tuple[int, int]] = field(default_factory=list)  # (group, host block)
    lifting: list[tuple[int, int, Sequence]] = field(default_factory=list)  # (group, block, owner)
    arrived: list[Sequence] = field(default_factory=list)
    offloaded: list[Sequence] = field(default_factory=list)
    is_counted: bool = False  # its sequences' num_inflight include the tokens it samples
