"""The work of a decode's attention that is counted for the paper estimates of results.md."""

import pytest

pytest.importorskip("triton")
from ops.benchmarks.gpu.attention_work import AttentionWork, work_of_decode
from tokenmill_worker.engine.attention.base import AttentionShape
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.cuda.graph_inputs import padded_length

LLAMA = AttentionShape(32, 8, 128, 0.1)  # tiles of 64 keys
MULTIPROCESSORS = 132


@pytest.mark.parametrize(
    ("batch", "context", "expected"),
    [
        (1, 512, AttentionWork(32, 2, 96, 2)),  # a program takes 128 keys at least
        (1, 16_000, AttentionWork(256, 8, 8, 2)),
        (4, 1024, AttentionWork(256, 2, 0, 2)),
        (8, 1024, AttentionWork(256, 4, 0, 2)),
        (32, 1024, AttentionWork(256, 16, 0, 1)),  # short contexts of a full device: no fold
        (256, 1024, AttentionWork(2048, 16, 0, 1)),
        (256, 4096, AttentionWork(4096, 32, 0, 2)),
    ],
)
def test_a_decode_fills_the_device(batch: int, context: int, expected: AttentionWork) -> None:
    length = padded_length(context, EngineConfig(model="none"), 16_384)
    assert work_of_decode(LLAMA, (context,) * batch, length, MULTIPROCESSORS) == expected


def test_shorter_contexts_have_fewer_programs() -> None:
    """One long sequence among 31 short ones: its programs read no more than 2,048 keys."""
    work = work_of_decode(LLAMA, (16_000, *(1000,) * 31), 16_384, MULTIPROCESSORS)
    assert work == AttentionWork(8 * (8 + 31), 32, 8 * 7 * 31, 2)
