"""Steps for the tests of graphs: inputs whose numbers tell where they come from; and a graph for a
CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention import AttentionMetadata
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.cuda.graphs import CapturedGraph
from tokenmill_worker.engines.own.device import StepInputs


def config(**changes: object) -> EngineConfig:
    intervals = {"q_padding_interval": 16, "kv_padding_interval": 64}
    settings: dict[str, object] = {**intervals, "max_num_seqs": 64}
    return EngineConfig(**{"model": "none", **settings, **changes})  # type: ignore[arg-type]


def step(
    lens: list[tuple[int, int]], num_rows: int | None = None, first_token: int = 7
) -> StepInputs:
    """`lens`: (query tokens, tokens in the cache). Ids, slots and tables are telling numbers."""
    num_tokens = sum(query_len for query_len, _ in lens)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, *(query_len for query_len, _ in lens)]).cumsum(0).int(),
        seq_lens=torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32),
        block_table=torch.arange(1, 1 + 5 * len(lens), dtype=torch.int32).view(len(lens), 5),
        slot_mapping=torch.arange(100, 100 + num_tokens),
        max_query_len=max(query_len for query_len, _ in lens),
        max_seq_len=max(seq_len for _, seq_len in lens),
        block_size=16,
        window=None,
        query_lens_host=tuple(query_len for query_len, _ in lens),
        seq_lens_host=tuple(seq_len for _, seq_len in lens),
    )
    rows = metadata.query_start[1:].long() - 1
    ids = torch.arange(first_token, first_token + num_tokens)
    return StepInputs(ids, ids + 1000, rows if num_rows is None else rows[:num_rows], (metadata,))


def fake_capture(run: Callable[[], Tensor]) -> CapturedGraph:
    """Capture nothing: a replay calls the function, which reads the static inputs."""
    output = run().clone()

    def replay() -> None:
        output.copy_(run())

    return CapturedGraph(replay, output)
