"""The bytes of each token alone, by which log-probabilities name tokens: on every family of
tokenizers.
"""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import (
    byte_level,
    gemma3,
    harmony,
    llama_like,
    metaspace,
    smollm2,
    thinking,
)
from tokenmill_schemas.generation import token_text
from tokenmill_worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(600)
TEXTS = ("Plain words, and more.", "日本語 ☁ naïve", "👩\u200d👧 𒀀𒁀", " two  spaces\n\tend", "a�b")
RARE = "\U000323af"  # in no vocabulary
EXACT = [byte_level, thinking, harmony, smollm2, gemma3]


def all_bytes(tokenizer: Tokenizer, ids: tuple[int, ...]) -> bytes:
    return b"".join(map(tokenizer.bytes_of, ids))


@pytest.mark.parametrize("make", EXACT)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_join_to_the_texts_bytes(make, text):
    tokenizer = make()
    assert all_bytes(tokenizer, tokenizer.encode(text)) == text.encode()


@pytest.mark.parametrize("make", [smollm2, byte_level, gemma3, llama_like])
def test_tokens_of_a_part_of_a_character_have_its_bytes_alone(make):
    tokenizer = make()
    ids = tokenizer.encode(RARE)
    parts = [tokenizer.bytes_of(token_id) for token_id in ids]
    assert len(parts) > 1
    assert b"".join(parts).lstrip() == RARE.encode()
    assert token_text(parts[-1]) == "".join(f"\\x{byte:02x}" for byte in parts[-1])


def test_a_token_keeps_the_space_that_the_beginning_of_a_text_loses():
    tokenizer = llama_like()
    [token_id] = tokenizer.encode("a")
    assert tokenizer.decode([token_id]) == "a"
    assert tokenizer.bytes_of(token_id) == b" a"


@pytest.mark.parametrize("make", [smollm2, gemma3, byte_level, llama_like, metaspace, harmony])
def test_a_special_token_has_the_bytes_of_its_name(make):
    tokenizer = make()
    assert tokenizer.special_tokens
    for name, token_id in tokenizer.special_tokens.items():
        assert tokenizer.decode([token_id]) == ""
        assert tokenizer.bytes_of(token_id) == name.encode()


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("token_id", [-1, 10**6, 1 << 40])
def test_an_id_without_a_token_has_no_bytes(make, token_id):
    assert make().bytes_of(token_id) == b""


def test_an_unknown_decoder_gives_the_text_behind_another_token():
    tokenizer = metaspace()
    [spaced] = tokenizer.encode("a")
    plain = tokenizer._tokenizer.convert_tokens_to_ids("b")
    assert (tokenizer.bytes_of(spaced), tokenizer.bytes_of(plain)) == (b" a", b"b")


def test_a_piece_of_a_word_has_no_mark():
    vocab = {"[UNK]": 0, "mill": 1, "##ing": 2}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [tokenizer.bytes_of(token_id) for token_id in (1, 2)] == [b" mill", b"ing"]


def test_a_tokenizer_that_cleans_texts_up_has_exact_bytes():
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level()._tokenizer.backend_tokenizer,
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    tokenizer = Tokenizer(fast)
    assert tokenizer._pieces is None
    assert [tokenizer.bytes_of(token_id) for token_id in (0xE2, 0x20)] == [b"\xe2", b" "]
