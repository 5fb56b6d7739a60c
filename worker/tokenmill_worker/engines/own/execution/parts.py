"""Builds the parts of a model runner for one loaded model and its allocated cache.

Each part is built once, before the first step. Which of them a runner has follows from the model
and the settings: recurrent states, drafts, adapters and grammars may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill_worker.engines.own.attention import AttentionBackend
from tokenmill_worker.engines.own.attention.common_prefix import least_saved_tokens
from tokenmill_worker.engines.own.execution.disk_cache import open_disk_cache
from tokenmill_worker.engines.own.execution.draft_model import DraftModel
from tokenmill_worker.engines.own.execution.inputs import InputBuilder
from tokenmill_worker.engines.own.execution.interface import RunnerHooks, RunnerInfo
from tokenmill_worker.engines.own.execution.recurrence import RecurrentStates, recurrent_states_for
from tokenmill_worker.engines.own.kv.offloader import Offloader
from tokenmill_worker.engines.own.kv.tensors import KVCachePool
from tokenmill_worker.engines.own.lora import Adapters
from tokenmill_worker.engines.own.model.loader import LoadedModel
from tokenmill_worker.engines.own.model.paged_attention import LayerBinding, bind_layers
from tokenmill_worker.engines.own.sampling import Drafts, GrammarCompiler, PromptLookup, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """The parts of a model runner. One that is None is missing."""

    info: RunnerInfo
    hooks: RunnerHooks  # to drafts, states and the disk
    loaded: LoadedModel
    backend: AttentionBackend
    layers: dict[int, LayerBinding]  # each attending layer's blocks, by its index
    offloader: Offloader
    inputs: InputBuilder
    sampler: Sampler
    grammars: GrammarCompiler | None
    adapters: Adapters | None
    states: RecurrentStates | None  # of the recurrent layers
    drafts: Drafts | None  # proposes tokens to the scheduler
    draft_model: DraftModel | None


def build_parts(
    loaded: LoadedModel,
    info: RunnerInfo,
    backend: AttentionBackend,
    pool: KVCachePool,
    host_pool: KVCachePool | None = None,
    grammars: GrammarCompiler | None = None,
    adapters: Adapters | None = None,
    draft_model: LoadedModel | None = None,
) -> RunnerParts:
    """Build the parts of the runner of a loaded model.

    Args:
        pool: the device's blocks, which hold the keys and values of `draft_model` too.
        host_pool: blocks, pinned here until the runner is closed; None: no offload.
        grammars, adapters, draft_model: None where the settings or the model exclude them.
    """
    device, config = loaded.device, info.config
    pinned = None if host_pool is None else device.pin([host_pool.blocks])
    offloader = Offloader(pool, host_pool, device.copy_stream(), pinned=pinned)
    disk = None
    if host_pool is not None and config.cache_disk:
        disk = open_disk_cache(loaded, draft_model, config, host_pool, offloader.synchronize)
    sampler = Sampler(
        info.vocab_size,
        device.torch_device,
        info.eos_token_ids,
        grammars,
        device.token_kernel(config),
    )
    states = recurrent_states_for(loaded, info)
    drafter = None
    if draft_model is not None:
        drafter = DraftModel(draft_model, info, backend, pool, sampler)
    # a recurrent state cannot go back behind a refused draft
    drafts = None if states is not None else _drafts(info, sampler, drafter)
    return RunnerParts(
        info=info,
        hooks=RunnerHooks(
            propose=drafts,
            draft=None if drafter is None else drafter.draft,
            has_state=None if states is None else states.pool.has_checkpoint,
            disk=disk,
        ),
        loaded=loaded,
        backend=backend,
        layers=bind_layers(loaded.groups, loaded.shapes, pool.layer, loaded.kv_scales),
        offloader=offloader,
        inputs=_input_builder(loaded, info, backend, pool),
        sampler=sampler,
        grammars=grammars,
        adapters=adapters,
        states=states,
        drafts=drafts,
        draft_model=drafter,
    )


def _input_builder(
    loaded: LoadedModel, info: RunnerInfo, backend: AttentionBackend, pool: KVCachePool
) -> InputBuilder:
    """Build the step's inputs, with common prefixes where attention reads one for all sequences."""
    config, cache = info.config, info.cache_config
    # outside of graphs, launches take longer on the host than a prefix saves on the device
    takes_prefixes = backend.takes_prefixes and config.cuda_graphs
    least_saved = (
        least_saved_tokens(cache.groups, pool.blocks.element_size()) if takes_prefixes else ()
    )
    return InputBuilder(cache, info.max_model_len, loaded.device, config.max_num_seqs, least_saved)


def _drafts(info: RunnerInfo, sampler: Sampler, drafter: DraftModel | None) -> Drafts:
    """Build what proposes drafts: grammars, then a draft model, then earlier text."""
    speculative_tokens = info.config.speculative_tokens
    return Drafts(
        sampler.forced_tokens,
        PromptLookup(speculative_tokens) if speculative_tokens else None,
        {} if drafter is None else drafter.guesses,
    )
