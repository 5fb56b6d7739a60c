"""The whole service beside the bare engine on a device: `ops/bench gpu --part way`.

A model of random weights and a tokenizer are written to memory (`/dev/shm`). A worker with Valkey,
SQLite and a subscriber for every stream serves the model, and so does a bare engine in a process of
its own. Both load it at once and then take turns with the same requests, as in `ops/bench service`.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ops.benchmarks.commands import engine
from ops.benchmarks.gpu.measures import prompt_ids
from ops.benchmarks.measure.step_floor import Shape
from ops.benchmarks.measure.workloads import Workload, WorkloadRequest

STEP_TOKENS = 2048  # as a worker's default on CUDA
MEMORY = Path("/dev/shm")


@contextmanager
def saved(model: Any, shape: Shape) -> Iterator[Path]:
    """Write the model with a tokenizer of as many tokens, into memory if there is room."""
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 1.1 * size
    with tempfile.TemporaryDirectory(
        prefix="tokenmill-bench-", dir=MEMORY if has_room else None
    ) as folder:
        model.save_pretrained(folder)
        _tokenizer(shape.vocab_size).save_pretrained(folder)
        yield Path(folder)


def _tokenizer(size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{number:x}" for number in range(size - len(letters))]
    vocabulary = {piece: token_id for token_id, piece in enumerate([*letters, *words])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]


def compare(
    folder: Path, shape: Shape, options: argparse.Namespace, logs: Path | None
) -> dict[str, Any]:
    """Serve as many streams as the largest batch, and return the service's share of the engine.

    Raises RuntimeError with the reason if one of them did not answer.
    """
    count, half = max(options.batch), options.context // 2
    prompts = [prompt_ids(shape, half, seed) for seed in range(count)]
    streams = Workload("streams", tuple(WorkloadRequest(prompt, half) for prompt in prompts))
    arguments = argparse.Namespace(
        model=str(folder), dtype=options.dtype, rounds=options.rounds, workload=None,
        set=[f"device={options.device}"], pool_tokens=count * (2 * half + 32),
        max_sequences=count, max_batch_tokens=STEP_TOKENS, keep=lambda _record: None, logs=logs,
    )  # fmt: skip
    record = engine.compare(arguments, [engine.WHOLE_WAY, engine.OURS], [streams])
    if error := record.get("error"):
        raise RuntimeError(str(error))
    return shares(record["results"]["streams"])


def shares(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what of the engine's tokens per second the service reaches.

    `share_of_engine` counts while all streams run. It is left out if in a round they never did.
    `of_all` counts from the first submit to the last stream's end, SQL's commit included.
    """
    whole, bare = results[engine.WHOLE_WAY], results[engine.OURS]
    found: dict[str, Any] = {"of_all": bare["ratio"], "whole_way": whole, "bare": bare}
    if "steady_tok_s" in whole and "steady_tok_s" in bare:
        found |= {"tokens_s": whole["steady_tok_s"], "share_of_engine": bare["steady_ratio"]}
    return found
