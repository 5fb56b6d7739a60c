"""The settings of a worker's vLLM and its abilities, read without vLLM."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from typing import ClassVar, Final, Literal

from tokenmill_worker.contract.capabilities import STRUCTURED, Capabilities
from tokenmill_worker.contract.engine_kind import EngineConfigError, EngineKind
from tokenmill_worker.contract.name_table import read_table
from tokenmill_worker.contract.setting_fields import field_problems, setting

MAX_LOGPROBS: Final = 100  # at a position, as the queue allows


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """Settings of vLLM that a worker names as our engine's; vLLM's others are in `engine_arg`."""

    kind: ClassVar[str] = "vllm"

    model: str = setting("", "a folder or a hub name")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = setting("auto", "as ours")
    max_model_len: int | None = setting(
        None, "longest prompt and answer together, in tokens", minimum=1
    )
    max_num_seqs: int = setting(0, "most sequences at once; 0: as vLLM chooses", minimum=0)
    max_num_batched_tokens: int = setting(
        0, "most tokens in one step; 0: as vLLM chooses", minimum=0
    )
    prefix_cache: bool = setting(True, "compute a common beginning of prompts once")
    adapters: str = setting("", "LoRA adapters that jobs may name, as name=folder,name=folder")
    max_loras: int = setting(4, "most different adapters in one step", minimum=1)
    trust_remote_code: bool = setting(False, "run code that comes with the model")
    engine_arg: str = setting(
        "", "another argument of vLLM, NAME=VALUE; several, or in one variable, with spaces between"
    )

    def __post_init__(self) -> None:
        if found := self.problems():
            raise EngineConfigError(found)

    def problems(self) -> list[str]:
        """Return one sentence for each setting that cannot work, with the given value."""
        found = field_problems(self)
        try:
            self.arguments()
        except ValueError as error:
            found.append(f"engine_arg {error}")
        try:
            _ = self.adapter_folders
        except ValueError as error:
            found.append(f"adapters {error}")
        return found

    def arguments(self) -> dict[str, str]:
        """Return vLLM's further arguments. Raises ValueError with what is wrong."""
        found: dict[str, str] = {}
        for word in shlex.split(self.engine_arg):
            name, sign, value = word.removeprefix("--").partition("=")
            if not sign or not name:
                raise ValueError(f"must be NAME=VALUE, separated by spaces, not {word!r}")
            if name in found:
                raise ValueError(f"names {name} twice")
            found[name] = value
        return found

    @property
    def adapter_folders(self) -> dict[str, str]:
        return read_table(self.adapters, "name=folder")


def capabilities_of(
    *, has_grammars: bool, has_adapters: bool, has_position_seeds: bool
) -> Capabilities:
    """Return the abilities of one loaded vLLM. Seeds go on exactly where its noise is keyed by
    position: its model runner V2.
    """
    return Capabilities(
        structured=STRUCTURED if has_grammars else (),
        tool_grammars=has_grammars,
        thinking_budget=has_grammars,
        scores=True,
        prompt_logprobs=True,
        adapters=has_adapters,
        exact_resume=has_position_seeds,
        unavailable=(
            "bad_words_ids", "sequence_bias", "no_repeat_ngram_size", "begin_suppress_tokens",
            "forced_bos_token_id", "forced_eos_token_id",
        ),
        limits={
            "temperature": (0.0, 2.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        },
    )  # fmt: skip


KIND: Final = EngineKind(
    config=VllmConfig,
    settings=tuple(field.name for field in fields(VllmConfig)),
    capabilities=capabilities_of(has_grammars=True, has_adapters=True, has_position_seeds=True),
)
