"""Makes vLLM's engine arguments from a worker's settings, and checks them before anything loads."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Final, NoReturn, get_args

from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tokenmill_schemas.generation import LOGPROBS_MODES
from tokenmill_worker.contract.engine_kind import EngineConfigError
from tokenmill_worker.contract.name_table import read_arguments
from tokenmill_worker.engines.own.model.vocabulary import has_tokenizer
from tokenmill_worker.engines.vllm.config import MAX_LOGPROBS, PACKAGE, SAME, TESTED, VllmConfig

# arguments on which the adapter depends
FIXED: Final = {
    "logprobs_mode": LOGPROBS_MODES[0],
    "max_logprobs": MAX_LOGPROBS,
    "scheduling_policy": "priority",
    "disable_log_stats": True,  # the adapter's own logger has the figures
    "enable_log_requests": False,
}
# what is refused as an argument: it follows from the worker's own settings, or the adapter sets it
OWNED: Final = {
    **{name: f"use --{name.replace('_', '-')}" for name in ("model", *SAME, "max_loras")},
    "enable_prefix_caching": "use --prefix-cache",
    "enable_lora": "use --adapters",
    **dict.fromkeys(("reasoning_parser", "reasoning_parser_plugin"), "use --reasoning-format"),
    **dict.fromkeys(
        (*FIXED, "skip_tokenizer_init", "generation_config", "structured_outputs_config"),
        "the worker sets it",
    ),
}


def check_version(version: str) -> None:
    """Raises EngineConfigError for a version of vLLM that is not tested."""
    if not version.startswith(TESTED):
        command = f"{sys.executable} -m pip install {PACKAGE}"
        words = f"vLLM {version} is not tested with this version of tokenmill: {command}"
        raise EngineConfigError([words])


def engine_args(settings: VllmConfig, folder: Path) -> AsyncEngineArgs:
    """Return vLLM's arguments. Raises EngineConfigError for one that it does not have."""
    args = _parsed(folder, read_arguments(settings.engine_arg))
    chosen = {name: value for name in SAME if (value := getattr(settings, name))}
    chosen |= {**FIXED, "enable_prefix_caching": settings.prefix_cache}
    chosen["skip_tokenizer_init"] = not has_tokenizer(folder)
    if folders := settings.adapter_folders.values():
        files = [json.loads(Path(one, "adapter_config.json").read_text("utf-8")) for one in folders]
        ranks = [(one.get("r", 0), *one.get("rank_pattern", {}).values()) for one in files]
        rank = max(args.max_lora_rank, *chain(*ranks))
        rank = next((taken for taken in get_args(MaxLoRARanks) if taken >= rank), rank)
        chosen |= {"enable_lora": True, "max_loras": settings.max_loras, "max_lora_rank": rank}
    for name, value in chosen.items():
        setattr(args, name, value)
    return args


def _parsed(folder: Path, given: Mapping[str, str]) -> AsyncEngineArgs:
    """Read the values as vLLM's own command line does."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    actions = parser._option_string_actions  # argparse has no public list of them

    def refuse(words: str) -> NoReturn:
        raise EngineConfigError([words])

    parser.error = lambda words: refuse(f"--engine-arg {words.removeprefix('argument --')}")
    words = [f"--model={folder}"]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        action = actions.get(flag)
        if action is None or flag in ("--help", f"--no-{action.dest.replace('_', '-')}"):
            near = difflib.get_close_matches(flag, actions, n=1)
            hint = f"; is {near[0].removeprefix('--')} meant?" if near else ""
            refuse(f"--engine-arg {name}: vLLM has no such argument{hint}")
        if action.dest in OWNED:
            refuse(f"--engine-arg {name}: {OWNED[action.dest]}")
        if action.nargs != 0:
            words.append(f"{flag}={value}")
        elif value.lower() in ("true", "false"):
            words.append(flag if value.lower() == "true" else flag.replace("--", "--no-", 1))
        else:
            refuse(f"--engine-arg {name}: {value!r} is neither true nor false")
    return AsyncEngineArgs.from_cli_args(parser.parse_args(words))
