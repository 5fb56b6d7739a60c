"""Computes the likelihood of a text with the engine's weights, kernels and paged cache."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmill_worker.engine.attention import AttentionMetadata, choose
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.execution.build import pick_device
from tokenmill_worker.engine.kv.tensors import KVCachePool, kv_dtype
from tokenmill_worker.engine.model.loader import load_model
from tokenmill_worker.engine.model.model_files import resolve
from tokenmill_worker.engine.model.paged_attention import PagedStep, bind_layers


class Scorer:
    """Scores one sequence of up to `max_tokens` at a time."""

    def __init__(self, config: EngineConfig, max_tokens: int) -> None:
        self._model = load_model(resolve(config.model), config, pick_device(config.device))
        device = self._model.device
        dtype = kv_dtype(config, self._model.dtype)
        self._backend = choose(
            config.attention,
            device.torch_device,
            dtype,
            list(self._model.shapes),
            config.block_size,
        )
        self._block_size = self._backend.block_size_of(config.block_size, device.torch_device)
        self._num_blocks = -(-max_tokens // self._block_size)  # of each group
        groups = self._model.groups
        num_blocks = 1 + len(groups) * self._num_blocks
        pool = KVCachePool.allocate(
            groups, num_blocks, self._block_size, self._backend, dtype, device
        )
        self._layers = bind_layers(groups, self._model.shapes, pool.layer, self._model.kv_scales)

    @torch.inference_mode()
    def nll(self, token_ids: Sequence[int]) -> float:
        """Return the mean negative log-likelihood per token after the first."""
        ids = torch.tensor(token_ids, device=self._model.device.torch_device)
        logits = self._logits(ids)
        return float(F.cross_entropy(logits[:-1].float(), ids[1:]))

    def _logits(self, ids: Tensor) -> Tensor:
        count = len(ids)
        metadata = tuple(
            self._metadata(
                count, group.window, (1 + index * self._num_blocks) * group.kernel_blocks
            )
            for index, group in enumerate(self._model.groups)
        )
        positions = torch.arange(count, device=ids.device)
        return self._model.logits(
            ids, positions, positions, PagedStep(self._backend, self._layers, metadata)
        )

    def _metadata(self, count: int, window: int | None, first: int) -> AttentionMetadata:
        """Return metadata of a sequence whose kernel blocks are consecutive from `first` on."""
        stop, where = first - (-count // self._block_size), self._model.device.torch_device
        return AttentionMetadata(
            query_start=torch.tensor([0, count], dtype=torch.int32, device=where),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=where),
            block_table=torch.arange(first, stop, dtype=torch.int32, device=where)[None],
            slot_mapping=torch.arange(count, device=where) + first * self._block_size,
            max_query_len=count,
            max_seq_len=count,
            block_size=self._block_size,
            window=window,
            query_lens_host=(count,),
            seq_lens_host=(count,),
        )
