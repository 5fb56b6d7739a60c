"""Executes plans: moves blocks, runs the model on packed tokens, samples.

A step is launched, then finished. In between its tokens are on the device only, and the next step
may already be launched on top of them. The scheduler has decided what to compute; the runner has no
policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engine.attention import AttentionBackend, choose
from tokenmill_worker.engine.config import CacheConfig, EngineConfig, EngineConfigError
from tokenmill_worker.engine.cpu.kernels.draw import draw_kernel
from tokenmill_worker.engine.cuda.graphs import Capture, CudaCapture, GraphRunner
from tokenmill_worker.engine.device import StepInputs
from tokenmill_worker.engine.execution import ranks
from tokenmill_worker.engine.execution.inputs import InputBuilder, PreviousTokens
from tokenmill_worker.engine.execution.memory import free_memory, size_cache
from tokenmill_worker.engine.kv.offloader import Offloader, PinnedPool
from tokenmill_worker.engine.kv.tensors import KVCachePool, kv_dtype
from tokenmill_worker.engine.lora import AdapterError, Adapters
from tokenmill_worker.engine.model import model_files
from tokenmill_worker.engine.model.loader import LoadedModel, load_model
from tokenmill_worker.engine.model.paged_attention import LayerBinding, PagedStep
from tokenmill_worker.engine.model.vocabulary import vocabulary
from tokenmill_worker.engine.plan import StepOutput, StepPlan
from tokenmill_worker.engine.sampling import GrammarCompiler, Layout, Sampled, Sampler
from tokenmill_worker.engine.sampling.draws import Kernel
from tokenmill_worker.engine.sampling.prompt_lookup import PromptLookup
from tokenmill_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step.

    `indices[i]` is the index in `plan.scheduled` of the i-th sequence that samples.
    """

    plan: StepPlan
    indices: tuple[int, ...]
    sampled: Sampled | None  # None: no sequence samples in this step
    done: torch.cuda.Event | None = None  # set if none samples and the device is asynchronous


class ModelRunner:
    """Owns the model, the KV tensors and the state per sequence; used by one thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        cache_config: CacheConfig,
        backend: AttentionBackend,
        pool: KVCachePool,
        host_pool: KVCachePool | None = None,
        grammars: GrammarCompiler | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.config = config
        self.cache_config = cache_config
        self.max_model_len = config.max_model_len or loaded.max_model_len
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.model_path: Path = loaded.path
        self.can_structure = grammars is not None
        self.is_asynchronous = bool(config.async_batching)
        self.proposer = (
            PromptLookup(config.speculative_tokens) if config.speculative_tokens else None
        )
        self._grammars = grammars
        self._adapters = adapters
        self._loaded = loaded
        self._backend = backend
        self._pool = pool
        self._layers = _bind(loaded, pool)
        self._offloader = Offloader(pool, host_pool)
        self._pinned: PinnedPool | None = None
        if host_pool is not None and loaded.device.type == "cuda":
            self._pinned = PinnedPool(host_pool, torch.cuda.cudart())  # type: ignore[no-untyped-call]
        self._inputs = InputBuilder(
            cache_config, self.max_model_len, loaded.device, config.max_num_seqs
        )
        kernel = _device_kernel(loaded.device, config)
        self._sampler = Sampler(
            loaded.vocab_size, loaded.device, loaded.eos_token_ids, grammars,
            kernel or draw_kernel(loaded.device), takes_any_dtype=kernel is not None,
        )  # fmt: skip
        self._previous: PreviousTokens | None = None
        self.graphs: GraphRunner | None = None

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        cache_dir: str | None = None,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> Self:
        """Find (and convert) and load the model, choose attention, size and allocate the cache.

        Raises:
            EngineConfigError: the settings cannot work here.
            OSError: the model is not found.
        """
        report = on_progress or (lambda _what, _fraction: None)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        path = model_files.resolve(config.model, cache_dir, report, config.trust_remote_code)
        report(f"loading {config.model}", 0.0)
        return cls.around(load_model(path, config), config, report)

    @classmethod
    def around(
        cls,
        loaded: LoadedModel,
        config: EngineConfig,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> Self:
        """Serve a model that is already loaded. Raises EngineConfigError."""
        report = on_progress or (lambda _what, _fraction: None)
        adapters = _adapters(loaded, config, report)
        may_shorten = config.max_model_len is None
        config = _resolved(config, loaded)
        dtype = kv_dtype(config, loaded.dtype)
        backend = choose(
            config.attention,
            loaded.device,
            dtype,
            list(loaded.shapes),
            config.block_size,
            config.amx,
        )
        cache_config, length = size_cache(loaded, config, backend, dtype, may_shorten)
        if config.tensor_parallel:
            cache_config = ranks.agree(cache_config)
        config = config.replace(attention=backend.name, max_model_len=length)
        pool = KVCachePool.allocate(
            loaded.groups, cache_config.num_blocks, config.block_size, backend, dtype, loaded.device
        )
        if loaded.device.type == "cpu" and pool.num_bytes <= free_memory(loaded.device) // 2:
            pool.touch()  # if memory is scarce, blocks are allocated at first use
        host_pool = None
        if any(cache_config.num_host_blocks):
            host_pool = KVCachePool.allocate(
                loaded.groups,
                cache_config.num_host_blocks,
                config.block_size,
                backend,
                dtype,
                torch.device("cpu"),
            )
        words = vocabulary(
            loaded.path, loaded.vocab_size, loaded.eos_token_ids, config.trust_remote_code
        )
        grammars = None
        if words is not None:
            grammars = GrammarCompiler(
                words.info, special_ids=words.special_ids, encode=words.encode
            )
        report(f"loading {config.model}", 1.0)
        runner = cls(loaded, config, cache_config, backend, pool, host_pool, grammars, adapters)
        if config.cuda_graphs and loaded.device.type == "cuda":
            runner.use_graphs(CudaCapture(loaded.device))
        return runner

    @property
    def description(self) -> str:
        blocks = " + ".join(str(count) for count in self.cache_config.num_blocks)
        dtype = str(self._loaded.dtype).removeprefix("torch.")
        return (
            f"{self.config.model} on {self._loaded.device}, {dtype}, attention {self._backend.name}, "
            f"{blocks} blocks of {self.config.block_size} tokens ({self._pool.num_bytes / 2**30:.2f} GiB)"
        )

    @property
    def graph_counts(self) -> tuple[int, int]:
        """CUDA graphs captured, and steps that replayed one."""
        return (
            (0, 0) if self.graphs is None else (self.graphs.num_captured, self.graphs.num_replays)
        )

    # ── a step ──

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Queue a step on the device; its tokens may feed the next step before `finish`."""
        if (
            self._loaded.direct is not None
        ):  # few torch operators: inference mode costs more than it saves
            return self._launch(plan)
        with torch.inference_mode():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> InFlightStep:
        self._offloader.run(plan)
        previous, self._previous = self._previous, None
        if not plan.scheduled:
            return InFlightStep(plan, (), None, self._mark())
        inputs = self._inputs.build(plan, previous)
        indices = tuple(index for index, item in enumerate(plan.scheduled) if item.samples)
        items = [plan.scheduled[index] for index in indices]
        self._sampler.prepare(items)
        is_adapted = self._adapters is not None and self._adapters.apply(plan)
        graphs = None if is_adapted else self.graphs  # a graph would replay another step's adapters
        layout = self._sampler.lay_out(items) if items else None
        sampled = None
        if graphs is None and layout is not None and layout.takes_highest:
            sampled = self._highest(inputs, layout)
        if sampled is None:
            logits = self._forward(inputs) if graphs is None else graphs.run(inputs)
            if layout is None:
                return InFlightStep(plan, (), None, self._mark())
            sampled = self._sampler.sample(logits, items, layout)
        self._previous = PreviousTokens(sampled.token_ids, items)
        return InFlightStep(plan, indices, sampled)

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Run another rank's step: the same moves and forward pass, no sampling."""
        self._offloader.run(plan)
        if plan.scheduled:
            self._forward(self._inputs.build(plan))

    def finish(self, step: InFlightStep) -> StepOutput:
        """Wait for the step's tokens, or for its end if none are sampled.

        Waiting in both cases keeps the host at most one step ahead.
        """
        if step.sampled is None:
            if step.done is not None:
                step.done.synchronize()
            return StepOutput(step.plan.step_id, (), (), {})
        tokens, logprobs, errors = step.sampled.finish()
        return StepOutput(
            step.plan.step_id,
            tokens,
            logprobs,
            {step.indices[i]: error for i, error in errors.items()},
        )

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event at the end of the queued work; None on CPU, where nothing is queued."""
        if self._loaded.device.type != "cuda":
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    def use_graphs(self, capture: Capture) -> GraphRunner:
        """Replay captured graphs for later steps where possible."""
        self.graphs = GraphRunner(self._forward, self.config, self.max_model_len, capture)
        return self.graphs

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        return self._loaded.logits(
            inputs.input_ids, inputs.positions, inputs.rows, self._paged(inputs)
        )

    def _highest(self, inputs: StepInputs, layout: Layout) -> Sampled | None:
        found = self._loaded.highest(
            inputs.input_ids, inputs.positions, inputs.rows, self._paged(inputs)
        )
        return None if found is None else self._sampler.take_highest(*found, layout)

    def _paged(self, inputs: StepInputs) -> PagedStep:
        return PagedStep(self._backend, self._layers, inputs.metadata, inputs.rows)

    # ── the rest of what the engine asks ──

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """Start compiling a grammar, outside the step; return None if the parameters need none."""
        return None if self._grammars is None else self._grammars.prepare(params)

    def prepare_adapter(self, name: str) -> Future[str]:
        """Start loading an adapter in its current version; the future gives that version's key.

        The future fails with AdapterError if the adapter cannot be used.
        """
        if self._adapters is not None:
            return self._adapters.prepare(name)
        refused: Future[str] = Future()
        refused.set_exception(AdapterError(f"adapter {name!r} is not served here; there are none"))
        return refused

    def release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._inputs.release(sequence)
            self._sampler.release(sequence)
            if self.proposer is not None:
                self.proposer.release(sequence)

    def is_alive(self) -> bool:
        """Return whether the device works; after a permanent failure every call on it fails."""
        if self._loaded.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self._loaded.device)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        self._offloader.synchronize()
        if self._pinned is not None:
            self._pinned.close()
        if self._adapters is not None:
            self._adapters.close()


def _adapters(
    loaded: LoadedModel, config: EngineConfig, report: Callable[[str, float], None]
) -> Adapters | None:
    """Load the adapters; return None if none are configured.

    They are loaded before the cache is sized, so that their memory counts. Raises
    EngineConfigError.
    """
    folders = {name: Path(folder).expanduser() for name, folder in config.adapter_folders.items()}
    if not folders:
        return None
    adapters = Adapters(loaded.model, folders, max_cached=config.max_cached_loras)
    problems = adapters.check(report)
    if problems:
        raise EngineConfigError(problems)
    return adapters


def _device_kernel(device: torch.device, config: EngineConfig) -> Kernel | None:
    """Return the CUDA kernel that draws tokens in one launch; None on CPU, or where torch must draw."""
    if device.type != "cuda" or not config.fuse or find_spec("triton") is None:
        return None
    from tokenmill_worker.engine.cuda.draw import DeviceDraw

    return DeviceDraw(device)


def _bind(loaded: LoadedModel, pool: KVCachePool) -> tuple[LayerBinding, ...]:
    bindings = {
        layer: LayerBinding(group, pool.layer(group, index), loaded.shapes[layer])
        for group, members in enumerate(loaded.groups)
        for index, layer in enumerate(members.layers)
    }
    return tuple(bindings[layer] for layer in range(len(bindings)))


def _resolved(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Return the configuration with every "auto" resolved."""
    dtype = str(loaded.dtype).removeprefix("torch.")
    is_cuda = loaded.device.type == "cuda"
    may_run_ahead = (
        is_cuda and not config.speculative_tokens
    )  # drafts follow tokens that the host knows
    return config.replace(
        dtype=dtype,
        kv_dtype=str(kv_dtype(config, loaded.dtype)).removeprefix("torch."),
        device=str(loaded.device),
        max_model_len=loaded.max_model_len,
        cuda_graphs=(is_cuda if config.cuda_graphs is None else config.cuda_graphs)
        and not config.tensor_parallel,  # a capture runs the pass several times, the other ranks once
        async_batching=(may_run_ahead if config.async_batching is None else config.async_batching)
        and not config.tensor_parallel,  # the other ranks receive a token with the next plan
    )
