"""`ops/gpu-check OUT`: runs the stages of a form and prints their table. OUT receives the logs."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ops.gpu_check import cache
from ops.gpu_check.forms import FORMS, stages_of
from ops.gpu_check.stages import ROOT, run_stages, table
from ops.gpu_check.wheels import CARRIED, install

LIMIT_S = 560.0  # of all stages together
TRITON = ROOT / ".gpu" / "triton"  # compiled kernels, packed in triton.tar


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ops/gpu-check", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the logs")
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="first",
        help="first: kernels, tests, families, one model; speed: two models; "
        "variants: common prefixes; way: the whole service",
    )
    parser.add_argument("--dry", action="store_true", help="every stage, tiny, on a CPU")
    options = parser.parse_args(arguments)
    started, out = time.monotonic(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    lines = [f"wheels: {install()}"]
    if options.dry:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    else:
        environment["TRITON_CACHE_DIR"] = str(TRITON)
        lines.append(f"cache: {cache.restore(CARRIED / 'triton.tar', TRITON)}")
    stages = stages_of(options.form, out, is_dry=options.dry)
    outcomes = run_stages(stages, out, environment, LIMIT_S - (time.monotonic() - started))
    if not options.dry:
        lines.append(f"cache: {cache.save(TRITON, out / 'triton.tar')}")
    lines = table(outcomes, lines)
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    return int(any(outcome.said != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
