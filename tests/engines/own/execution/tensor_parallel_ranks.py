"""Run by torchrun on every rank: generate with a split model; rank 0 prints the tokens as JSON.

With `graphs`, padded steps are captured and replayed on all ranks, until rank 1 refuses the third.
"""

import json
import sys
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ops.benchmarks.measure.collecting_engine import CollectingEngine
from tests.engines.own.cuda.steps import fake_capture
from tokenmill_worker.engines.own import EngineConfig, SamplingParams
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.cuda.graphs import (
    CapturedGraph,
    CaptureError,
    CommonCapture,
    GraphRunner,
)
from tokenmill_worker.engines.own.device import Forward


class RefusingCapture:
    """Captures two graphs; the third is refused by rank 1."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Callable[[], Tensor]) -> CapturedGraph:
        self.count += 1
        graph = fake_capture(run)
        if self.count == 3 and dist.get_rank() == 1:
            raise CaptureError("no room")
        return graph


class GraphedCpu(CpuDevice):
    def graphs(self, forward: Forward, config: EngineConfig, max_model_len: int) -> GraphRunner:
        return GraphRunner(forward, config, max_model_len, CommonCapture(RefusingCapture()))


def main(path: str, jobs: str, has_graphs: bool) -> None:
    if has_graphs:
        CpuDevice.graphs = GraphedCpu.graphs  # type: ignore[method-assign, assignment]
    config = EngineConfig(
        model=path, dtype="float32", device="cpu", num_blocks=24, block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4, attention="reference", tensor_parallel=True, num_threads=1,
        cpu_offload_gib=0.001, cuda_graphs=has_graphs, q_padding_interval=8,
    )  # fmt: skip
    with CollectingEngine.load(config) as engine:  # ranks above 0 follow in here, and never return
        prompts = json.loads(jobs)
        outputs = engine.generate_batch(
            prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        )
        sys.stdout.write("TOKENS " + json.dumps([output.token_ids for output in outputs]) + "\n")
        graphs = engine.runner._runner.graphs  # type: ignore[attr-defined]
        if graphs is not None:
            found = (graphs.num_captured, graphs.num_replays > 2, graphs.refusal)
            sys.stdout.write(f"GRAPHS {json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "graphs" in sys.argv[3:])
