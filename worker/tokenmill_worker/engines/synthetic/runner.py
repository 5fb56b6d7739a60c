"""Runs without a model: computes text-like tokens from the tokens before them, without torch.

The model name is `synthetic`, or `synthetic?step_ms=5&length=…`. Its output depends only on the
tokens so far and, where it samples, on the seed, as with a real model. A resumed answer is
therefore the one that would have come.

A prompt with `[[crash]]` kills the engine process, `[[fail]]` breaks the step, `[[hang]]` sleeps:
the faults of a device, on demand.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill_schemas.generation import SamplingParams, TokenLogprob
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.config.cache import CacheConfig, LayerGroup
from tokenmill_worker.engines.own.execution.interface import NO_HOOKS, RunnerHooks, RunnerInfo
from tokenmill_worker.engines.own.model.generation_config import read_defaults
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepOutput, StepPlan
from tokenmill_worker.engines.own.sequence import Sequence
from tokenmill_worker.engines.synthetic.config import KIND, SyntheticOptions

# Byte-level tokenizer in Transformers' format: token id = byte, 256 = end of text. It is part of
# the package: every engine that is killed would leave behind a folder made at its start.
TOKENIZER = Path(__file__).with_name("tokenizer")
END_OF_TEXT = 256
VOCAB_SIZE = 257
_LETTERS = b"etaoin shrdlu cmfwyp vbgkqjxz. "
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class SyntheticRunner:
    """Implements `interface.Runner`."""

    info: RunnerInfo
    options: SyntheticOptions
    hooks: RunnerHooks = NO_HOOKS
    # sequence → (tokens mixed in, state)
    _states: dict[Sequence, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def load(cls, config: EngineConfig) -> SyntheticRunner:
        """Build the runner. Raises EngineConfigError for options that the model does not have."""
        options = SyntheticOptions.parse(config.model)
        config = config.with_step_sizes(on_gpu=False).replace(block_size=config.block_size or 16)
        defaults = read_defaults(config.generation_config, TOKENIZER)
        group = LayerGroup(layers=(0,), num_kv_heads=1, head_dim=1)
        num_blocks = config.num_blocks or config.max_num_seqs * (1024 // config.block_size + 1)
        cache = CacheConfig(
            config.block_size, (group,), 1 + num_blocks, prefix_cache=config.prefix_cache
        )
        info = RunnerInfo(
            config=config,
            cache_config=cache,
            max_model_len=min(config.max_model_len or options.length, options.length),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({END_OF_TEXT}),
            sampling_defaults=defaults.params,
            model_path=TOKENIZER,
            capabilities=KIND.capabilities,
            warms_up=False,
            description=(f"synthetic model, {num_blocks} blocks of {config.block_size} tokens"),
        )
        return cls(info, options)

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def finish(self, plan: StepPlan) -> StepOutput:
        for item in plan.scheduled:
            self._misbehave(item.sequence)
        pause = self.options.step_ms / 1e3 + self.options.token_us * plan.num_tokens / 1e6
        if pause:
            time.sleep(pause)
        sampling = [item for item in plan.scheduled if item.samples]
        tokens = tuple((self._next_token(item),) for item in sampling)
        logprobs = tuple(
            (TokenLogprob(-0.5),) if item.sequence.params.wants_logprobs else None
            for item in sampling
        )
        scored = {
            index: (TokenLogprob(-0.5),) * item.num_scored
            for index, item in enumerate(plan.scheduled)
            if item.num_scored
        }
        return StepOutput(plan.step_id, tokens, logprobs, {}, scored)

    def release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)

    def prepare(self, params: SamplingParams, tenant: str = "") -> Future[object] | None:
        return None

    def prepare_adapter(self, name: str) -> Future[str]:
        """Return the adapter's name as its key; the name only changes the seed of the output."""
        found: Future[str] = Future()
        found.set_result(name)
        return found

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def _misbehave(self, sequence: Sequence) -> None:
        prompt = bytes(t for t in sequence.token_ids[: sequence.num_prompt_tokens] if t < 256)
        if b"[[" not in prompt:
            return
        if b"[[crash]]" in prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        if b"[[fail]]" in prompt:
            raise RuntimeError("this prompt breaks the step, as it asked to")
        if b"[[hang]]" in prompt:
            time.sleep(3600)

    def _next_token(self, item: ScheduledSequence) -> int:
        sequence = item.sequence
        start = 0x9E3779B97F4A7C15 ^ int.from_bytes(sequence.adapter.encode()[-7:], "little")
        count, state = self._states.get(sequence, (0, start))
        if count > sequence.num_tokens:
            count, state = 0, start
        for token in sequence.token_ids[count:]:
            state = ((state ^ token) * 0x100000001B3 + 0x632BE5AB) & _MASK
        self._states[sequence] = (sequence.num_tokens, state)
        return self._choose(sequence, state)

    def _choose(self, sequence: Sequence, state: int) -> int:
        noise = 0 if sequence.params.is_greedy else sequence.seed * 0x9E3779B97F4A7C15
        draw = ((state ^ noise ^ (state >> 29)) * 0xBF58476D1CE4E5B9 & _MASK) >> 20
        if sequence.token_ids[-1] == 0xC3:
            return 0xA9  # the second byte of "é": output must not end within a character
        may_end = (
            not sequence.params.ignore_eos
            and sequence.num_output_tokens >= sequence.params.min_tokens
        )
        if may_end and draw % self.options.mean_tokens == 0:
            return END_OF_TEXT
        return 0xC3 if draw % 41 == 1 else _LETTERS[(draw >> 8) % len(_LETTERS)]
