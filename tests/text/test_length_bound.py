"""The least number of tokens is below every encoding, and far above the length by longest token."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import byte_level, gemma3, llama_like, metaspace, smollm2
from tokenmill_worker.text.length_bound import _INERT, read_bound
from tokenmill_worker.text.token_pieces import BYTE_OF_LETTER, token_bytes
from tokenmill_worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(600)


def _byte_backend(*words: str, pre_tokenizer=None) -> Backend:
    """Byte-level, and each word is a token, by merges from its left."""
    vocab = dict(BYTE_OF_LETTER)
    merges: list[tuple[str, str]] = []
    letters = sorted(vocab, key=token_bytes)
    for word in words:
        spelled = "".join(letters[byte] for byte in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                merges.append((spelled[: end - 1], spelled[end - 1]))
                vocab[spelled[:end]] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def composing() -> Tokenizer:
    """Compose the text (NFC) before it is cut, as Qwen does."""
    backend = _byte_backend("e", "é", "\u1ec7", "한", "日本", "🙂🙂", "    ", "aaaa")
    backend.normalizer = normalizers.NFC()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def swallowing() -> Tokenizer:
    """Have a token that takes the spaces on its left."""
    backend = _byte_backend("ab")
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


MAKERS = {
    "byte level": byte_level, "llama": llama_like, "metaspace": metaspace, "smollm2": smollm2,
    "gemma3": gemma3, "composing": composing, "swallowing": swallowing,
}  # fmt: skip
PIECES = st.sampled_from(
    ["a", "ab", "abc", " ", "   ", "\n", "\t", "▁", "▁a", "é", "e", "\u0301", "\u0323", "\u0302",
     "ᄒ", "ᅡ", "ᆫ", "하", "日", "本", "🙂", "\u200d", "<user>", "<mask>", "<end>", "7", "x", "\x00",
     "\u3099", "か", "\u0430", "\U000110ba", "A\u030a", "the", "\u0645"]
)  # fmt: skip
TEXTS = st.lists(st.tuples(PIECES, st.integers(1, 40)), max_size=12).map(
    lambda runs: "".join(piece * count for piece, count in runs)
)


@pytest.fixture(scope="module", params=MAKERS, ids=list(MAKERS))
def tokenizer(request):
    return MAKERS[request.param]()


@given(text=TEXTS | st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_encoding_is_shorter_than_the_bound(tokenizer, text):
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize("text", ["", "a", " " * 5000, "abcabc" * 50, "<user>" * 40, "é日" * 30])
def test_no_encoding_of_a_long_run_is_shorter_than_the_bound(tokenizer, text):
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize("make", [smollm2, gemma3])
@pytest.mark.parametrize(
    "text", ["😀", "日本語", "some words of a text, ", "7", "e\u0301", "a", " "]
)
def test_the_bound_is_at_least_a_sixteenth_of_the_tokens(make, text):
    long = text * 30_000
    assert make().least_tokens(long) > len(make().encode(long)) / 16


def test_a_text_has_a_bound_under_normalisation_only_if_no_character_joins():
    assert composing().least_tokens("🙂" * 100_000) > 49_000
    assert composing().least_tokens("e\u0301" * 1000) == 0


def test_a_tokenizer_that_removes_joins_or_rewrites_text_has_no_bound():
    removing = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" "), behavior="removed"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    assert read_bound(_byte_backend("ab", pre_tokenizer=removing)) is None
    rewriting = _byte_backend("ab")
    rewriting.normalizer = normalizers.Lowercase()
    assert read_bound(rewriting) is None
    words = Backend(models.WordPiece(vocab={"[UNK]": 0, "ab": 1}, unk_token="[UNK]"))
    assert read_bound(words) is None
    unknown = Backend(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>"))
    assert read_bound(unknown) is None


def test_inert_characters_are_unchanged_by_normalisation():
    """Composition leaves them alone, and none of them joins what stands before it."""
    inert = {chr(point) for start, end in _INERT for point in range(start, end)}
    for letter in inert:
        assert unicodedata.combining(letter) == 0
        assert unicodedata.normalize("NFC", letter) == letter
    for point in range(0x110000):
        parts = unicodedata.decomposition(chr(point)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            assert chr(int(parts[1], 16)) not in inert
