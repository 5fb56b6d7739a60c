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
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.direct.manager import ContinuousBatchingManager
from tokenmill_worker.engine.engine import Engine
from tokenmill_worker.engine.errors import EngineError
from tokenmill_worker.engine.requests.results import RequestOutput
from tokenmill_worker.engine.types import SchedulingPolicy

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_TAKEN = {
    *_SAMPLING, "do_sample", "max_new_tokens", "min_new_tokens", "repetition_penalty",
    "eos_token_id",
}  # fmt: skip
# fields that say how `generate` computes, or that a causal model has no use for
_WITHOUT_EFFECT = {
    "transformers_version", "pad_token_id", "bos_token_id", "decoder_start_token_id", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "low_memory", "prefill_chunk_size", "return_dict_in_generate", "is_assistant",
    "continuous_batching_config",  # init_continuous_batching reads it
}  # fmt: skip
# values that leave the answer as it is, beside None, False and Transformers' defaults
_UNSET = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "typical_p": 1.0,
    "length_penalty": 1.0, "diversity_penalty": 0.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "min_length": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ContinuousBatchingConfig:
    """Cache, scheduling and graphs. None: the engine's default (`EngineConfig`)."""

    block_size: int | None = None  # tokens
    num_blocks: int | None = None
    max_batch_tokens: int | None = None  # per step
    max_memory_percent: float | None = None  # share of the free memory, 0 to 1
    scheduler_type: str = "fifo"  # or "prefill_first"
    allow_block_sharing: bool = True
    return_logprobs: bool = False
    use_cuda_graph: bool | None = None
    use_async_batching: bool | None = None
    q_padding_interval_size: int | None = None
    kv_padding_interval_size: int | None = None
    max_cached_graphs: int | None = None
    cpu_offload_space: float = 0.0  # GiB

    def applied_to(self, config: EngineConfig) -> EngineConfig:
        """Return the engine's configuration with these values."""
        values = {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "max_num_batched_tokens": self.max_batch_tokens,
            "max_memory_percent": self.max_memory_percent,
            "policy": SchedulingPolicy(self.scheduler_type),
            "prefix_cache": self.allow_block_sharing,
            "cuda_graphs": self.use_cuda_graph,
            "async_batching": self.use_async_batching,
            "q_padding_interval": self.q_padding_interval_size,
            "kv_padding_interval": self.kv_padding_interval_size,
            "max_cached_graphs": self.max_cached_graphs,
            "cpu_offload_gib": self.cpu_offload_space,
        }
        return config.replace(**{name: v for name, v in values.items() if v is not None})


def _batching_config(
    generation_config: Any, given: ContinuousBatchingConfig | None
) -> ContinuousBatchingConfig:
    """Return the configuration of the batching: the argument, or the generation config's own."""
    own = getattr(generation_config, "continuous_batching_config", None)
    if own is None:
        return given or ContinuousBatchingConfig()
    if given is not None:
        raise ValueError(
            "continuous_batching_config is given twice: alone and in generation_config"
        )
    if isinstance(own, ContinuousBatchingConfig):
        return own
    raise ValueError(
        "continuous_batching_config of a generation config must be tokenmill's "
        f"ContinuousBatchingConfig, not {type(own).__module__}.{type(own).__qualname__}"
    )


def sampling_params(generation_config: Any, return_logprobs: bool = False) -> SamplingParams:
    """Translate Transformers' GenerationConfig; None: its defaults, 20 greedy tokens.

    Raises ValueError for a field that the engine does not have.
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
    if (minimum := getattr(config, "min_new_tokens", None)) is not None:
        fields["min_tokens"] = minimum
    if (penalty := getattr(config, "repetition_penalty", None)) is not None:
        fields["repetition_penalty"] = penalty
    if getattr(config, "do_sample", None):
        given = {name: getattr(config, name, None) for name in _SAMPLING}
        fields |= {name: value for name, value in given.items() if value is not None}
    else:
        fields["temperature"] = 0.0
    if (ends := getattr(config, "eos_token_id", None)) is not None:
        ids = [ends] if isinstance(ends, int) else list(ends)
        fields |= {"ignore_eos": True, "stop_token_ids": tuple(i for i in ids if i >= 0)}
    return fields


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
        continuous_batching_config: ContinuousBatchingConfig | None = None,
    ) -> ContinuousBatchingManager:
        """Return a manager, not started.

        Raises EngineError while another one runs, and ValueError for a batching configuration that
        is given twice, also in `generation_config`.
        """
        if self._manager is not None and self._manager.is_running():
            raise EngineError("a manager of this model is running: stop it first")
        batching = _batching_config(generation_config, continuous_batching_config)
        params = sampling_params(generation_config, batching.return_logprobs)
        engine = self._engine_for(batching.applied_to(self._config))
        self._manager = ContinuousBatchingManager(engine, params)
        return self._manager

    @contextlib.contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
    ) -> Iterator[ContinuousBatchingManager]:
        """Run a manager inside the context; an exception there cancels what has not ended."""
        with self.init_continuous_batching(
            generation_config, continuous_batching_config
        ) as manager:
            yield manager

    def generate_batch(
        self,
        inputs: Seq[Seq[int]],
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        progress_bar: bool = False,
    ) -> dict[str, RequestOutput]:
        """Continue every prompt; return the outputs by request id, in the order of the inputs."""
        with self.continuous_batching_context_manager(
            generation_config, continuous_batching_config
        ) as manager:
            request_ids = manager.add_requests(inputs)
            found = {one.request_id: one for one in _shown(manager, len(inputs), progress_bar)}
        return {request_id: found[request_id] for request_id in request_ids}

    def close(self) -> None:
        """Stop the manager and release the engine's memory. A held model gets its attention
        back.
        """
        if self._manager is not None:
            self._manager.stop(cancel=True)
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
            self._engine, self._built_for = self._build(config), config
        return self._engine

    @property
    def _has_failed(self) -> bool:
        return self._manager is not None and self._manager.has_failed

    def _build(self, config: EngineConfig) -> Engine:
        if self._model is None:
            return Engine.load(config)
        from tokenmill_worker.engine.execution.build import runner_of_model

        self._attention = self._model.config._attn_implementation
        return Engine.around(runner_of_model(self._model, config))


def _shown(
    manager: ContinuousBatchingManager, total: int, progress_bar: bool
) -> Iterator[RequestOutput]:
    from tqdm import tqdm  # type: ignore[import-untyped]

    yield from tqdm(manager, total=total, disable=not progress_bar, unit="request")
