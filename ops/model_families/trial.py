"""Compares the engine's greedy answers, in ragged batches, with those of `generate`.

One trial is one family with one setting. It runs in a process of its own, so that a crash or a
timeout ends only this trial.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from ops.benchmarks.measure.generation import generate
from ops.model_families import small
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.engine import Engine

TrialOutcome = Literal["equal", "refused", "wrong", "crashed", "not built"]

PROMPT_LENGTHS = (5, 23, 40)  # the longer ones exceed a small window and are computed in chunks
MAX_TOKENS = 8
NEAR_TIE = 2e-3  # lead of the best logit below which two tokens tie; float noise is about 1e-5
TIME_LIMIT_S = 120.0
# one fork at a time: no other process inherits the end of a pipe that this one writes, and filelock
# refuses two at once
_FORKING = threading.Lock()


@dataclass(frozen=True)
class Trial:
    family: str
    setting: str  # "": the family's defaults
    outcome: TrialOutcome
    reason: str = ""  # the engine's sentence, or the error

    @property
    def name(self) -> str:
        return f"{self.family}, {self.setting}" if self.setting else self.family


@dataclass(frozen=True)
class _Wanted:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    leads: tuple[float, ...]  # lead of each token's logit over the next


def run(family: str, setting: str = "", time_limit_s: float = TIME_LIMIT_S, **engine: Any) -> Trial:
    """Run one trial in a process of its own.

    `engine` has the settings that differ from the engine's defaults.
    """
    import tokenmill_worker.engines.own.execution.build  # noqa: F401 - else each process would import it

    context = multiprocessing.get_context("fork")
    with _FORKING:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_report, args=(theirs, lambda: _try(family, setting, engine)), daemon=True
        )
        process.start()
        theirs.close()
    outcome: TrialOutcome = "crashed"
    reason = f"took more than {time_limit_s:.0f} seconds"
    if ours.poll(time_limit_s):
        try:
            outcome, reason = ours.recv()
        except EOFError:
            process.join(5)
            reason = f"the process ended with status {process.exitcode}"
    process.kill()
    process.join()
    return Trial(family, setting, outcome, reason)


def _report(pipe: Connection, attempt: Callable[[], tuple[TrialOutcome, str]]) -> None:
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        warnings.simplefilter("ignore")
        logging.disable()
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)
        pipe.send(attempt())


def _try(family: str, setting: str, engine: dict[str, Any]) -> tuple[TrialOutcome, str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = small.build(family, setting)
            model.save_pretrained(folder)
            wanted = _generate(model)
        except Exception as error:
            return "not built", _shortened(error)
        try:
            answers = _answers(Path(folder), wanted, engine)
        except EngineConfigError as error:
            return "refused", str(error).replace(folder, "MODEL")
        except Exception as error:
            return "crashed", _shortened(error)
    return _compare(wanted, answers)


def _shortened(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


@torch.inference_mode()
def _generate(model: Any) -> list[_Wanted]:
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call] # nothing ends an answer early
    draw = random.Random(7)
    found = []
    for length in PROMPT_LENGTHS:
        prompt = [draw.randrange(3, small.VOCAB) for _ in range(length)]
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False,
            pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.stack(output.logits, dim=1)[0].topk(2).values
        answer = output.sequences[0, length:].tolist()
        found.append(
            _Wanted(tuple(prompt), tuple(answer), tuple((best[:, 0] - best[:, 1]).tolist()))
        )
    return found


def _answers(folder: Path, wanted: list[_Wanted], changes: dict[str, Any]) -> list[list[int]]:
    """Generate with prompts in chunks of 8 tokens, beside the decodes of shorter ones."""
    settings: dict[str, Any] = {
        "model": str(folder), "dtype": "float32", "device": "cpu",
        "max_model_len": small.MAX_LENGTH, "num_blocks": 80,
        "max_num_seqs": 4, "max_num_batched_tokens": 20, "long_prefill_token_threshold": 8,
    }  # fmt: skip
    engine = Engine.load(EngineConfig(**{**settings, **changes}))
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    answers = generate(engine, [one.prompt for one in wanted], [params] * len(wanted))
    return [answer.token_ids for answer in answers.values()]


def _compare(wanted: list[_Wanted], answers: list[list[int]]) -> tuple[TrialOutcome, str]:
    """Compare answers; a difference where two tokens nearly tie is allowed."""
    for one, answer in zip(wanted, answers, strict=True):
        for index, (expected, lead) in enumerate(zip(one.answer, one.leads, strict=True)):
            if index >= len(answer) or answer[index] != expected:
                if lead > NEAR_TIE:
                    return "wrong", f"generate answers {list(one.answer)}, the engine {answer}"
                break
    return "equal", ""
