"""A model with Transformers' continuous-batching calls, from a path or from a model one holds.

    model = BatchedModel.from_pretrained("smollm2-135m-instruct")
    outputs = model.generate_batch(inputs=[[1, 2, 3]], generation_config=GenerationConfig(…))

Transformers' own GenerationConfig describes the sampling. A field of it that the engine does not
have is refused, not ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.direct.batching_config import ContinuousBatchingConfig
from tokenmill_worker.engines.own.direct.manager import ContinuousBatchingManager
from tokenmill_worker.engines.own.direct.request_arguments import (
    TOKEN_RULES,
    choice_ids,
    end_tokens,
    token_rules,
)
from tokenmill_worker.engines.own.direct.results import RequestOutput
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.errors import EngineError

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_RENAMED = {
    "min_new_tokens": "min_tokens", "repetition_penalty": "repetition_penalty",
    "num_return_sequences": "n",
}  # fmt: skip
_TAKEN = {*_SAMPLING, *_RENAMED, *TOKEN_RULES, "do_sample", "max_new_tokens", "eos_token_id"}
# fields that say how `generate` computes, or that a causal model has no use for
_WITHOUT_EFFECT = {
    "transformers_version", "pad_token_id", "bos_token_id", "decoder_start_token_id", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "low_memory", "prefill_chunk_size", "return_dict_in_generate", "is_assistant",
    "continuous_batching_config",  # init_continuous_batching reads it
}  # fmt: skip
# values that leave the answer as it is, beside None, False and Transformers' defaults
_UNSET = {
    "num_beams": 1, "num_beam_groups": 1,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "typical_p": 1.0,
    "length_penalty": 1.0, "diversity_penalty": 0.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "min_length": 0,
}  # fmt: skip


def _batching_config(generation_config: Any, given: Any) -> ContinuousBatchingConfig:
    """Return the configuration of the batching: the argument, or the generation config's own."""
    own = getattr(generation_config, "continuous_batching_config", None)
    if own is not None and given is not None:
        raise ValueError(
            "continuous_batching_config is given twice: alone and in generation_config"
        )
    found = given if own is None else own
    return ContinuousBatchingConfig() if found is None else ContinuousBatchingConfig.of(found)


def sampling_params(generation_config: Any, return_logprobs: bool = False) -> SamplingParams:
    """Translate Transformers' GenerationConfig; None: its defaults, 20 greedy tokens.

    Raises ValueError for a field that the engine does not have, or of another shape.
    """
    if isinstance(generation_config, SamplingParams):
        params = generation_config
    else:
        params = SamplingParams(**_sampling_fields(generation_config))
    if not return_logprobs:
        return params
    return msgspec.structs.replace(params, logprobs=True, logprobs_mode="processed_logprobs")


def _sampling_fields(config: Any) -> dict[str, Any]:
    if problems := _unsupported(config):
        raise ValueError(f"not supported in a generation config: {', '.join(problems)}")
    fields: dict[str, Any] = {"max_tokens": getattr(config, "max_new_tokens", None) or 20}
    for name, ours in _RENAMED.items():
        if (value := getattr(config, name, None)) is not None:
            fields[ours] = value
    if getattr(config, "do_sample", None):
        given = {name: getattr(config, name, None) for name in _SAMPLING}
        fields |= {name: value for name, value in given.items() if value is not None}
    else:
        fields["temperature"] = 0.0
    if (ends := getattr(config, "eos_token_id", None)) is not None:
        fields |= end_tokens(ends)
    return fields | token_rules(vars(config) if config is not None else {})


def _unsupported(config: Any) -> list[str]:
    """Return each field that is set, with its value, and that the engine does not have."""
    if config is None:
        return []
    ignored = _TAKEN | _WITHOUT_EFFECT
    if getattr(config, "max_new_tokens", None) is not None:
        ignored |= {"max_length"}  # Transformers looks at it only without max_new_tokens
    defaults = vars(type(config)())
    return [
        f"{name}={value!r}"
        for name, value in vars(config).items()
        if not (name.startswith("_") or name in ignored or value is None or value is False)
        and value not in (defaults.get(name), _UNSET.get(name))
    ]


class BatchedModel:
    """A model, its engine, and at most one running manager.

    The engine is built at the first use, and again when the batching configuration changes.
    """

    def __init__(self, config: EngineConfig, model: Any = None) -> None:
        self._config = config
        self._model = model  # a Transformers model that the caller holds, or None: load the path
        self._attention: str | None = None  # of the held model, while the engine has replaced it
        self._engine: Engine | None = None
        self._built_for: EngineConfig | None = None
        self._is_warm = False  # whether the engine has run its warm-up steps
        self._manager: ContinuousBatchingManager | None = None

    @classmethod
    def from_pretrained(cls, path: str, **settings: Any) -> BatchedModel:
        """Serve the model of a name or folder; `settings` are fields of EngineConfig."""
        return cls(EngineConfig(model=path, **settings))

    @classmethod
    def from_model(cls, model: Any, **settings: Any) -> BatchedModel:
        """Serve a Transformers model that the caller holds; weights changed in pause() take effect.

        The model's own modules run (`fuse=False`), with its attention replaced.
        """
        device = str(next(model.parameters()).device)
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        held: dict[str, Any] = {"device": device, "fuse": False, **settings}
        return cls(EngineConfig(model=name, **held), model)

    def init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        """Return a manager, not started.

        Args:
            generation_config: Transformers' GenerationConfig, or SamplingParams.
            continuous_batching_config: Ours or Transformers'; None: the generation config's own.
            workload_hints: An object such as Transformers' WorkloadHints: `num_requests` lowers the
                most requests of a step. Lengths need no hint here.

        Raises:
            EngineError: Another one runs.
            ValueError: An argument is not supported, or a batching configuration is given twice.
        """
        if self._manager is not None and self._manager.is_running():
            raise EngineError("a manager of this model is running: stop it first")
        batching = _batching_config(generation_config, continuous_batching_config)
        params = sampling_params(generation_config, batching.return_logprobs)
        engine = self._engine_for(batching.applied_to(self._config, workload_hints))
        self._manager = ContinuousBatchingManager(
            engine, params, batching.seed, batching.max_queue_size
        )
        return self._manager

    @contextlib.contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: Any = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: Any = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: Any = None,
    ) -> Iterator[ContinuousBatchingManager]:
        """Run a manager inside the context; an exception there cancels what has not ended.

        `block` and `timeout` are those of its `stop`. `persistent_manager` has no effect: engine
        and cached prefixes stay until `close`. `warmup`: call its `warmup`, once for an engine.
        """
        manager = self.init_continuous_batching(
            generation_config, continuous_batching_config, workload_hints
        )
        if warmup and not self._is_warm:
            manager.warmup()
            self._is_warm = True
        manager.start()
        has_left = False
        try:
            yield manager
            has_left = True
        finally:
            manager.stop(block, timeout, hard_stop=not has_left)

    def generate_batch(
        self,
        inputs: Seq[Seq[int]],
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        max_new_tokens: int | None = None,
    ) -> dict[str, RequestOutput]:
        """Continue every prompt; return the outputs by request id, in the order of the inputs.

        Of several choices the further ones stand before the first, as in Transformers. Arguments
        are those of `continuous_batching_context_manager` and of its manager's `add_requests`.
        """
        num_choices = sampling_params(generation_config).n
        with self.continuous_batching_context_manager(
            generation_config,
            continuous_batching_config=continuous_batching_config,
            persistent_manager=persistent_manager,
            warmup=warmup,
        ) as manager:
            ids = manager.add_requests(inputs, max_new_tokens, record_timestamps=record_timestamps)
            total = len(inputs) * num_choices
            found = {one.request_id: one for one in _shown(manager, total, progress_bar)}
        names = [choice_ids(request_id, num_choices) for request_id in ids]
        return {name: found[name] for first, *others in names for name in (*others, first)}

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Do what `close` does."""
        self.close()

    def close(self) -> None:
        """Stop the manager and release the engine's memory. A held model gets its attention
        back.
        """
        if self._manager is not None:
            self._manager.stop(hard_stop=True)
        if self._engine is not None:
            self._engine.stop(drain=False)
        if self._attention is not None:
            self._model.set_attn_implementation(self._attention)
        self._engine = self._built_for = self._manager = self._attention = None

    def __enter__(self) -> BatchedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engine_for(self, config: EngineConfig) -> Engine:
        if self._engine is None or self._built_for != config or self._has_failed:
            self.close()
            self._engine, self._built_for, self._is_warm = self._build(config), config, False
        return self._engine

    @property
    def _has_failed(self) -> bool:
        return self._manager is not None and self._manager.has_failed

    def _build(self, config: EngineConfig) -> Engine:
        if self._model is None:
            return Engine.load(config)
        from tokenmill_worker.engines.own.execution.build import runner_of_model

        self._attention = self._model.config._attn_implementation
        return Engine.around(runner_of_model(self._model, config))


def _shown(
    manager: ContinuousBatchingManager, total: int, progress_bar: bool
) -> Iterator[RequestOutput]:
    from tqdm import tqdm  # type: ignore[import-untyped]

    yield from tqdm(manager, total=total, disable=not progress_bar, unit="request")
