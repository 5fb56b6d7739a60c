"""Gives the recurrent layers of a step their states, and keeps checkpoints for the prefix cache."""

from __future__ import annotations

from dataclasses import replace

from tokenmill_worker.engines.own.device import StepInputs
from tokenmill_worker.engines.own.execution.interface import RunnerInfo
from tokenmill_worker.engines.own.model.loader import LoadedModel
from tokenmill_worker.engines.own.model.recurrent_states import StatePool
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepPlan


class RecurrentStates:
    """The states of a model's sequences, by the rows of their step inputs."""

    def __init__(self, pool: StatePool, block_size: int) -> None:
        self.pool = pool
        self._block_size = block_size

    def added(self, plan: StepPlan, inputs: StepInputs) -> StepInputs:
        """Return the inputs with the states that the step reads and writes."""
        metadata = inputs.metadata[0]
        keys = [self._key(item, item.start) for item in plan.scheduled]
        return replace(
            inputs,
            recurrence=self.pool.step(
                inputs.sequence_rows, metadata.query_lens_host, metadata.seq_lens_host, keys
            ),
        )

    def keep(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Keep the states that the step has left at its sequences' checkpoints."""
        for item, row in zip(plan.scheduled, inputs.sequence_rows, strict=True):
            end = item.start + item.num_tokens
            if end in item.sequence.checkpoints and (key := self._key(item, end)) is not None:
                self.pool.keep(row, end, key)

    def _key(self, item: ScheduledSequence, end: int) -> bytes | None:
        """Return the hash of the sequence's tokens up to `end`, if these are whole blocks."""
        hashes = item.sequence.block_hashes
        number, rest = divmod(end, self._block_size)
        return hashes[number - 1] if 0 < number <= len(hashes) and not rest else None


def recurrent_states_for(loaded: LoadedModel, info: RunnerInfo) -> RecurrentStates | None:
    """Allocate the states of a model that has recurrent layers; return None for another."""
    if not loaded.state_bytes:
        return None
    num_rows, cache = info.config.max_num_seqs, info.cache_config
    num_checkpoints = num_rows if cache.prefix_cache else 0
    pool = StatePool(num_rows, loaded.device.torch_device, num_checkpoints)
    return RecurrentStates(pool, cache.block_size)
