"""Run by torchrun on every rank: generate with a split model; rank 0 prints the tokens as JSON."""

import json
import sys

from tokenmill_worker.engine import Engine, EngineConfig, SamplingParams


def main(path: str, jobs: str) -> None:
    config = EngineConfig(
        model=path, dtype="float32", device="cpu", num_blocks=24, block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4, attention="reference", tensor_parallel=True, num_threads=1,
        cpu_offload_gib=0.001,
    )  # fmt: skip
    with Engine.load(config) as engine:  # ranks above 0 follow in here, and never return
        prompts = json.loads(jobs)
        outputs = engine.generate_batch(
            prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        )
        sys.stdout.write("TOKENS " + json.dumps([output.token_ids for output in outputs]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
