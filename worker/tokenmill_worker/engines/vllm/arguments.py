"""Makes vLLM's engine arguments from a worker's settings, and checks them before anything loads."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, get_args

from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tokenmill_schemas.generation import LOGPROBS_MODES
from tokenmill_worker.engines.vllm.config import MAX_LOGPROBS, PACKAGE, TESTED, VllmConfig

SAME: Final = (
    "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "trust_remote_code",
)  # fmt: skip
# arguments that follow from the worker's own settings, or on which the adapter depends
OWNED: Final = {
    **{name: f"use --{name.replace('_', '-')}" for name in ("model", *SAME, "max_loras")},
    "enable_prefix_caching": "use --prefix-cache",
    "enable_lora": "use --adapters",
    "reasoning_parser": "use --reasoning-format",
    "reasoning_parser_plugin": "use --reasoning-format",
    **dict.fromkeys((
        "logprobs_mode", "scheduling_policy", "max_logprobs", "disable_log_stats",
        "enable_log_requests", "skip_tokenizer_init", "generation_config",
        "structured_outputs_config",
    ), "the worker sets it"),
}  # fmt: skip


class ArgumentError(ValueError):
    """An engine argument cannot be used; one sentence says why."""


def check_version(version: str) -> None:
    """Raises ArgumentError for a version of vLLM that is not tested."""
    first, below = TESTED
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not first <= (int(found[1]), int(found[2])) < below:
        raise ArgumentError(
            f"vLLM {version} is not tested with this version of tokenmill: {sys.executable} -m pip "
            f"install {PACKAGE}"
        )


def engine_args(settings: VllmConfig, folder: str) -> AsyncEngineArgs:
    """Return vLLM's arguments. Raises ArgumentError for one that it does not have."""
    args = _parsed(folder, settings.arguments())
    chosen: dict[str, Any] = {
        **{name: value for name in SAME if (value := getattr(settings, name))},
        "enable_prefix_caching": settings.prefix_cache,
        "logprobs_mode": LOGPROBS_MODES[0],
        "max_logprobs": MAX_LOGPROBS,
        "scheduling_policy": "priority",
        "disable_log_stats": True,  # the adapter's own logger has the figures
        "enable_log_requests": False,
    }
    if folders := settings.adapter_folders().values():
        rank = max(args.max_lora_rank, *map(_rank_of, folders))
        rank = next((taken for taken in get_args(MaxLoRARanks) if taken >= rank), rank)
        chosen |= {"enable_lora": True, "max_loras": settings.max_loras, "max_lora_rank": rank}
    for name, value in chosen.items():
        setattr(args, name, value)
    return args


def _rank_of(folder: str) -> int:
    config = json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
    ranks: list[int] = [config.get("r", 0), *config.get("rank_pattern", {}).values()]
    return max(ranks)


def _parsed(folder: str, given: Mapping[str, str]) -> AsyncEngineArgs:
    """Read the values as vLLM's own command line does."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = {
        flag.removeprefix("--").replace("-", "_"): (flag, action)
        for action in parser._actions  # argparse has no public list of them
        for flag in action.option_strings
        if flag.startswith("--") and not flag.startswith("--no-") and flag != "--help"
    }
    words = [f"--model={folder}"]
    for name, value in given.items():
        known = name.replace("-", "_")
        if known in OWNED:
            raise ArgumentError(f"--engine-arg {name}: {OWNED[known]}")
        if known not in flags:
            near = difflib.get_close_matches(known, flags, n=1)
            hint = f"; is {near[0].replace('_', '-')} meant?" if near else ""
            raise ArgumentError(f"--engine-arg {name}: vLLM has no such argument{hint}")
        flag, action = flags[known]
        if action.nargs != 0:
            words.append(f"{flag}={value}")
        elif value.lower() in ("true", "false"):
            off = flag.replace("--", "--no-", 1)
            words.append(flag if value.lower() == "true" else off)
        else:
            raise ArgumentError(f"--engine-arg {name}: {value!r} is neither true nor false")

    def fail(message: str) -> NoReturn:
        raise ArgumentError(f"--engine-arg {message.removeprefix('argument --')}")

    parser.error = fail
    return AsyncEngineArgs.from_cli_args(parser.parse_args(words))
