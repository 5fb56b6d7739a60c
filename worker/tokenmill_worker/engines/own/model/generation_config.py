"""Reads what a model's `generation_config.json` says: its own sampling defaults, and the tokens
that end a sequence.

Only what the file states is a default, as in vLLM: what it leaves out keeps its neutral value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.config import EngineConfigError

FILE: Final = "generation_config.json"

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _EndTokens(msgspec.Struct):
    """The keys that hold whatever `generation_config` is set to."""

    eos_token_id: _TokenId | tuple[_TokenId, ...] | None = None

    @property
    def ids(self) -> frozenset[int] | None:
        found = self.eos_token_id
        if found is None:
            return None
        return frozenset([found] if isinstance(found, int) else found)


class _Defaults(_EndTokens):
    """The keys that are read, with the ranges of request parameters. Others are ignored."""

    do_sample: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=1e-6, le=100)] | None = None
    max_new_tokens: _Positive | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0 if self.do_sample is False else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_new_tokens,
        )


class GenerationDefaults(msgspec.Struct, frozen=True):
    """A model's own defaults: sampling parameters of requests that name none, and the ids that end
    a sequence (None: the file names none).
    """

    params: SamplingParams = SamplingParams()
    eos_token_ids: frozenset[int] | None = None

    def end_ids(self, config: Any) -> frozenset[int]:
        """Return the ids that end a sequence, else those that the model's configuration names."""
        if self.eos_token_ids is not None:
            return self.eos_token_ids
        found = getattr(config, "eos_token_id", None)
        return frozenset(() if found is None else [found] if isinstance(found, int) else found)


def read_defaults(setting: str | None, folder: Path) -> GenerationDefaults:
    """Read the defaults of the model in `folder`.

    The ids that end a sequence come from the model's folder unless another file names some.

    Args:
        setting: "model" for the file in the model's folder, "none" or None for no sampling
            defaults, else the path of a file, or of a folder that has one.
        folder: The model's folder; it may lack the file.

    Raises:
        EngineConfigError: The file is missing where a path is set, is no JSON, or has a value of
            another type or outside its range.
    """
    own = folder / FILE
    if setting is None or setting == "none":
        return GenerationDefaults(eos_token_ids=_read(own, _EndTokens).ids)
    if setting == "model":
        found = _read(own, _Defaults)
        return GenerationDefaults(found.params, found.ids)
    path = Path(setting).expanduser()
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise EngineConfigError(
            [f"generation_config must be model, none, or a folder or file that exists, not {path}"]
        )
    found = _read(path, _Defaults)
    ids = _read(own, _EndTokens).ids if found.ids is None else found.ids
    return GenerationDefaults(found.params, ids)


_Content = TypeVar("_Content", bound=_EndTokens)


def _read(path: Path, kind: type[_Content]) -> _Content:
    """Decode a file; a missing one has no keys."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except (msgspec.MsgspecError, OSError, UnicodeError) as error:
        raise EngineConfigError([f"{path} cannot be used: {error}"]) from error
