"""The settings of the synthetic engine: those of our engine that act on scheduler and requests, and
the options in the model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final
from urllib.parse import parse_qsl

from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.contract.engine_kind import EngineConfigError, EngineKind
from tokenmill_worker.engines.own.config import EngineConfig

MODEL: Final = "synthetic"


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """Options of the model name.

    `step_ms` is slept per step, `token_us` per computed token. `length` is the model's context.
    """

    step_ms: float = 0.0
    token_us: float = 0.0
    length: int = 4096
    mean_tokens: int = 97

    @classmethod
    def parse(cls, model: str) -> SyntheticOptions:
        """Parse the options in a model name.

        Raises EngineConfigError for an unknown option or a value that is no number.
        """
        _, _, query = model.partition("?")
        kinds = {"step_ms": float, "token_us": float, "length": int, "mean_tokens": int}
        values: dict[str, float] = {}
        for name, text in parse_qsl(query):
            try:
                values[name] = kinds[name](text)
            except (KeyError, ValueError):
                raise EngineConfigError(
                    [f"model option {name}={text}: known are {', '.join(kinds)}, numbers"]
                ) from None
        return cls(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticConfig(EngineConfig):
    """Settings of our engine for a model without weights; of those that KIND does not name the
    defaults hold.
    """

    kind: ClassVar[str] = "synthetic"

    def problems(self) -> list[str]:
        """Return one sentence for each setting that cannot work, with the given value."""
        found = EngineConfig.problems(self)
        if self.model.partition("?")[0] != MODEL:
            return [*found, f"model must be {MODEL} or {MODEL}?OPTION=VALUE, not {self.model!r}"]
        try:
            SyntheticOptions.parse(self.model)
        except EngineConfigError as error:
            found += error.problems
        return found


KIND = EngineKind(
    config=SyntheticConfig,
    settings=(
        "model", "max_model_len", "prefix_cache", "policy", "max_num_batched_tokens",
        "max_num_seqs", "enable_chunked_prefill", "long_prefill_token_threshold",
        "max_num_partial_prefills", "bulk_slowdown", "generation_config", "adapters", "max_loras",
    ),
    capabilities=Capabilities(
        scores=True, prompt_logprobs=True, adapters=True, exact_resume=True
    ),
)  # fmt: skip
