"""Tensor parallelism: rank 0 plans and samples, the other ranks follow its plans.

The model is split by Transformers' own plan (`tp_plan="auto"`); each rank holds some heads and
their KV. Before each step rank 0 broadcasts the plan as MessagePack in a tensor: positions, token
ids, new blocks, block moves. A follower has no scheduler. It builds the same inputs, runs the same
forward pass (or captures and replays the same graph), whose collectives join those of rank 0, and
drops the logits. Steps are synchronous, because a follower receives sampled tokens with the next
plan. A step that fails on one rank ends all ranks: the others are inside its collectives, and no
step can be repeated. Start it with torchrun; every rank makes the same call.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.messages import FOLLOWS
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.execution.build import load_model_runner
from tokenmill_worker.engines.own.execution.ranks import Ranks
from tokenmill_worker.engines.own.execution.runner import InFlightStep, ModelRunner
from tokenmill_worker.engines.own.plan import BlockCopy, ScheduledSequence, StepOutput, StepPlan
from tokenmill_worker.engines.own.sequence import Sequence
from tokenmill_worker.engines.own.types import ProgressCallback


class _BroadcastItem(msgspec.Struct, array_like=True):
    key: int
    epoch: int
    start: int
    num_tokens: int
    draft_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # from `start` on, without the drafts
    num_blocks: tuple[int, ...]  # by layer group: table entries that were sent before
    block_tables: tuple[tuple[int, ...], ...]  # by layer group: the entries after those
    samples: bool
    scored_from: int
    num_scored: int


class BroadcastStep(msgspec.Struct, tag="step"):
    step_id: int
    items: tuple[_BroadcastItem, ...]
    swap_out: tuple[tuple[int, int], ...]
    swap_in: tuple[tuple[int, int], ...]


class _Release(msgspec.Struct, tag="release"):
    keys: tuple[int, ...]


class _End(msgspec.Struct, tag="end"):
    pass


_Message = BroadcastStep | _Release | _End
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Message)


@dataclass(slots=True)
class _SentState:
    """The state of a sequence that the other ranks have.

    Within one epoch a block table only grows. Followers keep entries that left a sliding window;
    they are not read.
    """

    key: int
    epoch: int
    num_blocks: tuple[int, ...]


class PlanEncoder:
    """Encodes plans for the other ranks; of each sequence only what they do not have yet."""

    def __init__(self) -> None:
        self._known: dict[Sequence, _SentState] = {}
        self._next_key = 0

    def describe(self, plan: StepPlan) -> BroadcastStep:
        return BroadcastStep(
            plan.step_id,
            tuple(self._item(item) for item in plan.scheduled),
            *(_flat(copies) for copies in (plan.swap_out, plan.swap_in)),
        )

    def _item(self, item: ScheduledSequence) -> _BroadcastItem:
        sequence = item.sequence
        tables = sequence.block_tables
        known = self._known.get(sequence)
        if known is None:
            known = self._known[sequence] = _SentState(
                self._next_key, item.epoch, (0,) * len(tables)
            )
            self._next_key += 1
        sent = known.num_blocks if known.epoch == item.epoch else (0,) * len(tables)
        known.epoch, known.num_blocks = item.epoch, tuple(map(len, tables))
        stop = item.start + item.num_tokens - item.num_proposed
        return _BroadcastItem(
            key=known.key,
            epoch=item.epoch,
            start=item.start,
            num_tokens=item.num_tokens,
            draft_ids=item.draft_ids,
            token_ids=(*sequence.token_ids[item.start : stop], *item.forced_ids),
            num_blocks=sent,
            block_tables=tuple(
                tuple(table[first:]) for table, first in zip(tables, sent, strict=True)
            ),
            samples=item.samples,
            scored_from=item.scored_from,
            num_scored=item.num_scored,
        )

    def forget(self, sequences: Iterable[Sequence]) -> tuple[int, ...]:
        """Return and remove the keys of those sequences that the other ranks have."""
        return tuple(
            self._known.pop(sequence).key for sequence in sequences if sequence in self._known
        )


class TensorParallelRunner:
    """The runner of rank 0: broadcasts each plan, then executes it."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self.info, self.hooks = runner.info, runner.hooks
        self._runner = runner
        self._ranks = ranks
        self._plans = PlanEncoder()

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        cache_dir: str | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> TensorParallelRunner:
        """Join the ranks and load this rank's part of the model; every rank makes the same call.

        On rank 0, return the runner. Ranks above 0 follow until rank 0 closes, then raise
        SystemExit.
        """
        ranks = Ranks.join(config.device)
        runner = load_model_runner(config, cache_dir, on_progress)
        if ranks.rank == 0:
            return cls(runner, ranks)
        if on_progress is not None:
            on_progress(FOLLOWS, 0.0)
        follow(runner, ranks)
        raise SystemExit(0)

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Broadcast the plan and launch it.

        Raises GroupLostError if it fails: the other ranks are then in the middle of the step.
        """
        try:
            if not plan.is_empty:
                self._ranks.broadcast(_encoder.encode(self._plans.describe(plan)))
            return self._runner.launch(plan)
        except Exception as error:
            raise self._ranks.fail(error) from error

    def finish(self, step: InFlightStep) -> StepOutput:
        try:
            return self._runner.finish(step)
        except Exception as error:
            raise self._ranks.fail(error) from error

    def prepare(self, params: SamplingParams, tenant: str = "") -> Future[Any] | None:
        return self._runner.prepare(params, tenant)

    def prepare_adapter(self, name: str) -> Future[str]:
        return self._runner.prepare_adapter(name)

    def release(self, sequences: Iterable[Sequence]) -> None:
        gone = list(sequences)
        self._runner.release(gone)
        keys = self._plans.forget(gone)
        if keys:
            self._ranks.broadcast(_encoder.encode(_Release(keys)))

    def is_alive(self) -> bool:
        return self._runner.is_alive()

    def close(self) -> None:
        if not self._ranks.is_lost:
            self._ranks.broadcast(_encoder.encode(_End()))
        self._runner.close()
        self._ranks.leave()


def follow(runner: ModelRunner, ranks: Ranks) -> None:
    """Run rank 0's plans until it closes.

    Raises GroupLostError when a step fails here or the group is lost.
    """
    sequences: dict[int, Sequence] = {}
    try:
        while not isinstance(message := _decoder.decode(ranks.broadcast(None)), _End):
            if isinstance(message, BroadcastStep):
                runner.follow(rebuild(message, sequences))
            else:
                runner.release(sequences.pop(key) for key in message.keys if key in sequences)
    except Exception as error:
        raise ranks.fail(error) from error
    runner.close()
    ranks.leave()


def rebuild(step: BroadcastStep, sequences: dict[int, Sequence]) -> StepPlan:
    scheduled = []
    for item in step.items:
        sequence = sequences.get(item.key)
        if sequence is None:
            sequence = sequences[item.key] = Sequence(str(item.key), [], 0, SamplingParams())
        known = sequence.token_ids
        del known[item.start :]
        # placeholders for a cached prefix, which is never read here
        known += [0] * (item.start - len(known))
        known += item.token_ids
        sequence.epoch = item.epoch
        if not sequence.block_tables:
            sequence.block_tables = [[] for _ in item.block_tables]
        for table, first, entries in zip(
            sequence.block_tables, item.num_blocks, item.block_tables, strict=True
        ):
            table[first:] = entries
        scheduled.append(
            ScheduledSequence(
                sequence, item.start, item.num_tokens, item.samples, item.draft_ids, item.epoch,
                item.scored_from, item.num_scored,
            )
        )  # fmt: skip
    moves = [tuple(BlockCopy(*copy) for copy in copies) for copies in (step.swap_out, step.swap_in)]
    return StepPlan(step.step_id, tuple(scheduled), *moves)


def _flat(copies: tuple[BlockCopy, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((copy.source, copy.target) for copy in copies)
