"""Pairs of ranks, for test_failing_ranks: `MODEL FOLDER PORT…`. In the pair at the first port rank
0 fails in the middle of the third step, in the next one rank 1.

Started without torchrun, which would end the other rank by itself; each rank is a fork of this
process, which has imported everything once. Rank 0 stays alive after its engine has failed, as a
program that handles the error would. What rank R of pair P said is in FOLDER/P-R.txt, and its exit
status, when it has ended, in FOLDER/P-R.status.
"""

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ops.benchmarks.measure.collecting_engine import CollectingEngine
from tokenmill_worker.engines.own import EngineConfig, SamplingParams
from tokenmill_worker.engines.own.device import StepInputs
from tokenmill_worker.engines.own.errors import EngineError
from tokenmill_worker.engines.own.execution.build import load_model_runner
from tokenmill_worker.engines.own.execution.ranks import Ranks
from tokenmill_worker.engines.own.execution.runner import ModelRunner
from tokenmill_worker.engines.own.execution.tensor_parallel import TensorParallelRunner, follow
from tokenmill_worker.engines.own.model.paged_attention import PagedStep


def break_third_step(runner: ModelRunner) -> None:
    """Make step 3 fail after its first layer, while the other rank waits in the next collective."""
    forward, steps = runner.forward, itertools.count(1)

    def failing(inputs: StepInputs) -> torch.Tensor:
        if next(steps) < 3:
            return forward(inputs)
        step: Any = _Breaking(PagedStep(runner._backend, runner._layers, inputs.metadata))
        return runner._loaded.logits(inputs.input_ids, inputs.positions, inputs.rows, step)

    runner.forward = failing  # type: ignore[method-assign]


class _Breaking:
    def __init__(self, step: PagedStep) -> None:
        self._step = step

    def attend(self, module: Any, *arguments: Any) -> torch.Tensor:
        if module.layer_idx == 1:
            raise RuntimeError("this rank is broken")
        return self._step.attend(module, *arguments)


def main(path: str, folder: Path, ports: list[str]) -> None:
    ranks = {}
    for failing, port in enumerate(ports):
        for rank in (0, 1):
            name = f"{failing}-{rank}"
            pid = os.fork()
            if pid == 0:
                said = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT)
                os.dup2(said, 1)
                os.dup2(said, 2)
                local = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": 2,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                os.environ.update({key: str(value) for key, value in local.items()})  # noqa: TID251 - torch reads them
                serve(path, failing)
                sys.stdout.flush()
                os._exit(0)
            ranks[pid] = name
    while ranks:
        pid, status = os.wait()
        ended = folder / f"{ranks.pop(pid)}.new"
        ended.write_text(str(os.waitstatus_to_exitcode(status)))
        ended.rename(ended.with_suffix(".status"))


def serve(path: str, failing: int) -> None:
    config = EngineConfig(
        model=path, dtype="float32", device="cpu", num_blocks=24, block_size=4,
        attention="reference",
        tensor_parallel=True, num_threads=1,
    )  # fmt: skip
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        ranks = Ranks.join("cpu")
        runner = load_model_runner(config)
        if failing == 1:
            break_third_step(runner)
        follow(runner, ranks)
        return
    leader = TensorParallelRunner.load(config)
    if failing == 0:
        break_third_step(leader._runner)
    engine = CollectingEngine.around(leader)
    try:
        engine.generate_batch(
            [[3, 4, 5]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        )
    except EngineError as error:
        sys.stdout.write(f"LOST {error}\n")
        sys.stdout.flush()
        engine.runner.close()
        if failing == 0:
            time.sleep(300)
        os._exit(9)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
