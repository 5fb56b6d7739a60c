"""Incremental text is the tokenizer's own text, cut where it is certain: on random ids, for every
family.
"""

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import tokenizers
from tokenmill_worker.text.token_pieces import MAX_WINDOW, REPLACEMENT, WindowDetokenizer

FAMILIES = [tokenizers.byte_level, tokenizers.llama_like, tokenizers.metaspace]
REAL = [tokenizers.smollm2, tokenizers.gemma3]
pytestmark = pytest.mark.timeout(600)  # the first test of a fresh machine converts the models


def pieces_of(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_the_pieces_join_to_the_tokenizer_s_decoded_text(family, data):
    tokenizer = family()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", REAL)
def test_pieces_of_random_ids_and_bytes_join_to_real_tokenizers_text(make):
    tokenizer = make()
    vocabulary = tokenizers.vocabulary(tokenizer)
    bare_bytes = [i for i, text in enumerate(vocabulary) if len(text) == 1] or list(range(256))
    halves = [i for i, text in enumerate(vocabulary) if is_broken(text)]
    draw = random.Random(4)
    kinds = (
        partial(draw.randrange, tokenizer.vocab_size),
        partial(draw.choice, bare_bytes),
        partial(draw.choice, halves),
    )
    for _ in range(1500):
        weights = draw.choice([(1, 0, 0), (1, 1, 1), (1, 4, 0), (1, 0, 6)])
        ids = [draw.choices(kinds, weights)[0]() for _ in range(draw.randrange(40))]
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids), ids


def is_broken(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return True
    return False


@pytest.mark.parametrize("make", REAL)
@pytest.mark.parametrize(
    "text",
    [
        "Plain words, and more.",
        "  two leading spaces",
        "日本語のテキスト",
        "👩\u200d👩\u200d👧\u200d👦 family",
        "क्षत्रिय ﷽ 𒀀𒁀",
        "a\u0301\n\n\tb",
        "ﬁ\x00\x7f\ufffd!",
    ],
)
def test_encoded_text_is_returned_in_whole_characters(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    allowed = text.count(REPLACEMENT)
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == allowed


@pytest.mark.parametrize("make", [*FAMILIES, *REAL])
def test_returned_text_is_never_revised(make):
    """Each prefix of the tokens, decoded as a whole, begins with the text before its last token."""
    tokenizer = make()
    draw = random.Random(1)
    ids = [draw.randrange(min(tokenizer.vocab_size, 400)) for _ in range(60)]
    received = ""
    detokenizer = tokenizer.detokenizer()
    for length in range(1, len(ids) + 1):
        received += detokenizer.push(ids[length - 1])
        assert tokenizer.decode(ids[:length]).startswith(received)


@pytest.mark.parametrize("make", REAL)
def test_ordinary_tokens_are_returned_at_once(make):
    """Text is held back for half characters only; a lag of one token would be noticeable."""
    tokenizer = make()
    ids = tokenizer.encode("The quick brown fox, jumps over 13 lazy dogs.")
    assert all(pieces_of(tokenizer, ids)[:-1])


def test_a_character_in_byte_tokens_is_returned_when_its_run_ends():
    tokenizer = tokenizers.llama_like()
    euro = [byte + 1 for byte in "€".encode()]
    a = tokenizer._tokenizer.convert_tokens_to_ids("a")
    assert pieces_of(tokenizer, [*euro, a]) == ["", "", "", "€a", ""]


def test_an_invalid_run_of_byte_tokens_is_returned_as_soon_as_it_is_invalid():
    tokenizer = tokenizers.llama_like()
    ids = [0xE2 + 1, 0x28 + 1, 0x41 + 1]
    assert pieces_of(tokenizer, ids) == ["", REPLACEMENT * 2, REPLACEMENT, ""]
    assert tokenizer.decode(ids) == REPLACEMENT * 3


def test_special_tokens_give_no_text_and_added_tokens_do():
    for make in FAMILIES:
        tokenizer = make()
        find = tokenizer._tokenizer.convert_tokens_to_ids
        ids = [find("<pad>"), find("b"), find("<end>"), find("<user>")]
        assert "".join(pieces_of(tokenizer, ids)) == "b<user>"


def test_a_leading_space_is_removed_once():
    tokenizer = tokenizers.llama_like()
    assert "".join(pieces_of(tokenizer, tokenizer.encode("  a a"))) == "  a a"
    assert tokenizer._tokenizer.decode(tokenizer.encode("  a a")) == "  a a"


def test_the_decoding_window_stays_short():
    calls = []

    def decode(ids):
        calls.append(len(ids))
        return "".join("x" if i else REPLACEMENT for i in ids)

    detokenizer = WindowDetokenizer(decode)
    draw = random.Random(3)
    for _ in range(2000):
        detokenizer.push(int(draw.random() < 0.02))
    assert max(calls) <= 2 * MAX_WINDOW
