"""Tokenizers for tests: two real ones, and tiny ones of each family of decoders, built in memory.

Each is made once per process; none of them ever asks the network. torch is imported for the real
ones only.
"""

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tokenmill_worker.text.token_pieces import token_bytes
from tokenmill_worker.text.tokenizer import Tokenizer

CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@cache
def smollm2() -> Tokenizer:
    """Byte-level, with a chat template."""
    return _real("smollm2-135m-instruct")


@cache
def gemma3() -> Tokenizer:
    """SentencePiece-like with byte fallback; no chat template."""
    return _real("gemma3-270m")


@cache
def byte_level() -> Tokenizer:
    """256 bytes, three merges, `<end>` and the special `<pad>`; token 256 + i is a merge."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=token_bytes)
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


THINKING_CHAT = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% "
    "endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined %}<think>\n{% if not enable_thinking %}</think>\n{% endif %}"
    "{% endif %}{% endif %}"
)
CHANNEL_CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% else %}<|channel|>{% endif %}"
)


@cache
def thinking() -> Tokenizer:
    """Byte-level; its chat template has thoughts between `<think>` and `</think>`."""
    return _marked(["<think>", "</think>"], THINKING_CHAT)


@cache
def channels() -> Tokenizer:
    """Byte-level; its chat template has the channels of gpt-oss."""
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    return _marked(marks, CHANNEL_CHAT)


@cache
def harmony() -> Tokenizer:
    """Byte-level, as `channels`; the marks are special tokens, as gpt-oss has them."""
    marks = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"]
    return _marked(marks, "{% set count = (tools or []) | length %}" + CHANNEL_CHAT, special=True)


@cache
def hermes() -> Tokenizer:
    """Byte-level; the marks of Hermes' tool calls are special tokens."""
    return _marked(["<tool_call>", "</tool_call>"], CHAT, special=True)


def _marked(marks: list[str], chat: str, *, special: bool = False) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=token_bytes)
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(mark, normalized=False, special=special) for mark in marks])
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"), chat)


@cache
def llama_like() -> Tokenizer:
    """Byte fallback, spaces as ▁, and the first space of the text cut."""
    backend = _fallback_backend()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrap(backend)


@cache
def metaspace() -> Tokenizer:
    """Make a tokenizer without a state machine of ours, so the window detokenizer is used."""
    backend = _fallback_backend()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _wrap(backend)


def _real(name: str) -> Tokenizer:
    from tokenmill_worker.engines.own.model.model_files import resolve

    return Tokenizer.load(resolve(name))


def _fallback_backend() -> Backend:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ["▁", "a", "b", "▁a", "▁▁", "é", "ab", "\n"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    return Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))


def _wrap(backend: Backend) -> Tokenizer:
    backend.add_tokens([AddedToken("<user>", normalized=False)])
    backend.add_special_tokens(
        [AddedToken("<end>", special=True), AddedToken("<pad>", special=True)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    return Tokenizer(fast, CHAT)


def vocabulary(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of each token id, empty for special tokens."""
    pieces = tokenizer._pieces
    assert pieces is not None
    return [_as_bytes(pieces.piece(token_id)) for token_id in range(tokenizer.vocab_size)]


def _as_bytes(piece: bytes | str | int | None) -> bytes:
    if isinstance(piece, int):
        return bytes((piece,))
    return piece.encode() if isinstance(piece, str) else piece or b""
