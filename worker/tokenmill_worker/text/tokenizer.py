"""Converts texts and chats to token ids, and token ids to text, with one model's tokenizer, loaded
offline from its folder.

Other threads run while a text is tokenised. The tokenizer checks no length: the input processor
compares the number of tokens with the model's length.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from tokenmill_worker.text.chat.reasoning import ReasoningFormat, detect
from tokenmill_worker.text.chat.templates import ChatTemplate
from tokenmill_worker.text.chat.tools import ToolFormat, detect_tools, special_marks
from tokenmill_worker.text.length_bound import LengthBound, read_bound
from tokenmill_worker.text.prompt_tail import PromptTail
from tokenmill_worker.text.token_pieces import Detokenizer, Pieces, WindowDetokenizer, read_pieces

# Classes of a tokenizer.json that needs no other class.
_GENERIC: Final = frozenset({"PreTrainedTokenizer", "TokenizersBackend"})
# Model type ("": a tokenizer alone) → the classes that AutoTokenizer takes as they are named. For
# other types and names it has rules of its own: Qwen2's folders get Qwen2's class in any case.
AS_NAMED: Final[Mapping[str, frozenset[str]]] = {
    "": _GENERIC,
    "llama": _GENERIC,
    "smollm3": _GENERIC,
    "gpt_oss": _GENERIC,
    "qwen2": frozenset({"Qwen2Tokenizer"}),
    "qwen3": _GENERIC | {"Qwen2Tokenizer"},
    "qwen3_moe": _GENERIC | {"Qwen2Tokenizer"},
    "gemma": frozenset({"GemmaTokenizer"}),
    "gemma2": frozenset({"GemmaTokenizer"}),
    "gemma3": frozenset({"GemmaTokenizer"}),
    "gemma3_text": frozenset({"GemmaTokenizer"}),
}

_importing = threading.Lock()


class Tokenizer:
    """Wraps a Transformers tokenizer (`PreTrainedTokenizerFast`, or any with the same calls)."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, chat_template)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._encoder = _plain_encoder(tokenizer)
        self._special = _special_ids(tokenizer, backend)
        self._alone = None if backend is None else read_pieces(backend, self._special)
        self._pieces: Pieces | None = self._alone
        if self._alone is not None and _cleans_up(tokenizer, backend):
            self._pieces = None
        self.bytes_of: Callable[[int], bytes] = cache(self._bytes_of)
        self._bound: LengthBound | None = None if backend is None else read_bound(backend)

    @classmethod
    def load(
        cls, folder: str | Path, chat_template: str | None = None, trust_remote_code: bool = False
    ) -> Tokenizer:
        """Load from a model's folder, without network access. Raises OSError if there is no
        tokenizer, ValueError if it has code of its own that is not trusted.
        """
        return cls(_load(Path(folder), trust_remote_code), chat_template)

    # ── encoding ──

    def encode(self, text: str, special: bool = False) -> tuple[int, ...]:
        """Encode a text on the caller's thread; other threads run meanwhile.

        Args:
            special: add the model's special tokens around it (a beginning-of-sequence token, if it
                has one). A prompt has them; the text of `template.render` has them already.
        """
        if self._encoder is None:
            return tuple(self._tokenizer.encode(text, add_special_tokens=special))
        # A batch of one text: the call for a lone text holds the interpreter's lock to its end.
        (found,) = self._encoder.encode_batch_fast([text], add_special_tokens=special)
        return tuple(found.ids)

    def tail_of(self, text: str, ids: tuple[int, ...], special: bool) -> tuple[int, int]:
        """Return where the end of a prompt begins that is enough to encode what follows the prompt:
        in its text and in its tokens. (0, 0): all of it is needed.
        """
        return (0, 0) if self._tail is None else self._tail.find(text, ids, special)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the text's number of tokens; 0 if there is none. It is cheap, so
        that absurdly long texts need not be tokenised.
        """
        return self._bound.least_tokens(text) if self._bound is not None else 0

    @cached_property
    def _tail(self) -> PromptTail | None:
        backend = self._encoder
        return None if backend is None else PromptTail(backend, self.encode)

    # ── decoding ──

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode a whole output, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """Create a detokenizer for one sequence."""
        if self._pieces is not None:
            return self._pieces.detokenizer()
        return WindowDetokenizer(self.decode, self._special)

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token alone: those of its text, which may be a part of a character,
        or of a special token's name; none for an id without a token.
        """
        if token_id in self._special:
            return str(self._tokenizer.convert_ids_to_tokens(token_id)).encode()
        if self._alone is not None:
            return self._alone.bytes_of(token_id) if 0 <= token_id < 1 << 32 else b""
        if not 0 <= token_id < self.vocab_size:
            return b""
        # Behind itself: at the beginning of a text, a decoder may cut a space or show a mark.
        once, twice = self.decode([token_id]), self.decode([token_id] * 2)
        return twice.removeprefix(once).encode()

    # ── facts ──

    def reasoning_format(self, wanted: str) -> ReasoningFormat | None:
        """Return the format of the model's thoughts; `wanted` as in `detect`. Raises ValueError."""
        return detect(self._tokenizer, self.template.text, wanted)

    def tool_format(self, wanted: str) -> ToolFormat | None:
        """Return the format of the model's tool calls; `wanted` as in `detect_tools`."""
        return detect_tools(self.template.text, wanted)

    def special_marks(self, form: ToolFormat) -> dict[str, int]:
        return special_marks(self._tokenizer, form)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the tokens that `decode` leaves out, by their letters."""
        added = self._tokenizer.added_tokens_decoder
        return {str(token): id_ for id_, token in added.items() if id_ in self._special}

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's own end-of-sequence ids; a model's generation config may name more."""
        eos = self._tokenizer.eos_token_id
        return (
            frozenset()
            if eos is None
            else frozenset(eos if isinstance(eos, list | tuple) else (eos,))
        )


def import_library() -> None:
    """Import what `Tokenizer.load` needs. A worker does it while its engine loads the model."""
    with contextlib.suppress(ImportError):  # `load` raises it again
        _imported()


def _load(folder: Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer by its class name if the class is known to be the one that the files name.
    AutoTokenizer would read the model's settings for the class, and so import torch: seconds of
    work, and 300 MiB that this process has no use for.
    """
    transformers = _imported()
    named = str(_settings(folder / "tokenizer_config.json").get("tokenizer_class")).removesuffix(
        "Fast"
    )
    if named in AS_NAMED.get(_model_type(folder), ()) and not _has_own_code(folder):
        kind = transformers.TokenizersBackend if named in _GENERIC else getattr(transformers, named)
        return kind.from_pretrained(str(folder), local_files_only=True)
    return transformers.AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=trust_remote_code
    )


def _imported() -> Any:
    """Import Transformers without its advice to install PyTorch, which no tokenizer needs.

    One thread at a time: two that import parts of it, each in its own order, may wait for each
    other, and Python then gives one of them a module that is not complete.
    """
    advice = logging.getLogger("transformers")
    with _importing:
        advice.disabled = True
        try:
            import transformers

            _ = transformers.TokenizersBackend  # where most of the time goes
        finally:
            advice.disabled = False
    return transformers


def _model_type(folder: Path) -> str:
    path = folder / "config.json"
    return str(_settings(path).get("model_type")) if path.exists() else ""


def _has_own_code(folder: Path) -> bool:
    return any(
        "auto_map" in _settings(folder / name) for name in ("config.json", "tokenizer_config.json")
    )


def _settings(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Returns an empty dictionary if the file cannot be read:
    AutoTokenizer then says what is wrong, or finds another way.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain_encoder(tokenizer: Any) -> Any:
    """Return the underlying `tokenizers` object if Transformers adds nothing to it: Transformers'
    wrapping of a short text takes ten times as long as the encoding. Returns None for tokenizers
    with an encoding of their own.
    """
    import transformers

    base, kind = transformers.TokenizersBackend, type(tokenizer)
    if not isinstance(tokenizer, base):
        return None
    if any(
        getattr(kind, name) is not getattr(base, name)
        for name in ("encode", "_encode_plus", "__call__")
    ):
        return None
    tokenizer.encode("")  # resets truncation and padding settings of the files
    return tokenizer.backend_tokenizer


def _special_ids(tokenizer: Any, backend: Any) -> frozenset[int]:
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def _cleans_up(tokenizer: Any, backend: Any) -> bool:
    """Return whether decoding ends with a pass over the text ("do n't" → "don't"). BPE tokenizers
    skip it unless their settings force it.
    """
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and (
        type(backend.model).__name__ != "BPE"
        or bool(
            getattr(
                tokenizer,
                "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
                False,
            )
        )
    )
