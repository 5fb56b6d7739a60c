"""Continuations encoded behind the end of a prompt are those of the whole texts, token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.input.test_input_processor_continuations import admitted, request
from tests.support.tokenizers import byte_level, gemma3, llama_like, smollm2
from tests.text.test_length_bound import composing
from tokenmill_worker.text.prompt_tail import MIN_CHARS
from tokenmill_worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(600)
MAKERS = {
    "byte level": byte_level, "llama": llama_like, "smollm2": smollm2, "gemma3": gemma3,
    "composing": composing,
}  # fmt: skip
PIECES = st.sampled_from(
    ["The sky", " is", " blue", ".", "\n\n", "  ", " ", "\t", "don't", "'s", "123", "4", "e",
     "\u0301", "\u0323", "日本語", "。", "🙂",
     "<|im_end|>", "<user>", "<end>", "(x)", "aaaa", "▁", "한"]
)  # fmt: skip
TEXTS = st.lists(st.tuples(PIECES, st.integers(1, 30)), min_size=8, max_size=40).map(
    lambda runs: "".join(piece * count for piece, count in runs)
)


@pytest.fixture(scope="module", params=MAKERS, ids=list(MAKERS))
def tokenizer(request):
    return MAKERS[request.param]()


@given(prompt=TEXTS, following=st.lists(PIECES, min_size=1, max_size=4).map("".join))
@settings(max_examples=100, deadline=None)
def test_tail_and_continuation_have_the_tokens_of_the_whole_text(tokenizer, prompt, following):
    ids = tokenizer.encode(prompt, special=True)
    start, count = tokenizer.tail_of(prompt, ids, special=True)
    assert start <= max(0, len(prompt) - MIN_CHARS)
    found = ids[:count] + tokenizer.encode(prompt[start:] + following, special=not start)
    assert found == tokenizer.encode(prompt + following, special=True)


@pytest.mark.parametrize("make", [smollm2, gemma3])
@pytest.mark.parametrize("words", ["Some words of a prompt, ", "一段很长的中文提示。"])
def test_a_long_prompt_has_a_short_tail(make, words):
    tokenizer, prompt = make(), words * 400
    ids = tokenizer.encode(prompt, special=True)
    start, count = tokenizer.tail_of(prompt, ids, special=True)
    assert len(prompt) - 2 * MIN_CHARS < start <= len(prompt) - MIN_CHARS
    assert 0 < count < len(ids)


async def test_many_continuations_encode_the_prompt_a_few_times():
    class Counting(Tokenizer):
        num_chars = 0

        def encode(self, text, special=False):
            self.num_chars += len(text)
            return super().encode(text, special)

    tokenizer = Counting(smollm2()._tokenizer)
    prompt = "Some words of a prompt, " * 200
    continuations = tuple(f" and answer {i}" for i in range(128))
    job = await admitted(request(*continuations, prompt=prompt), tokenizer)
    assert tokenizer.num_chars < 4 * len(prompt) + 128 * 3 * MIN_CHARS
    whole = smollm2().encode(prompt + continuations[77])
    assert job.generation.prompt.token_ids + job.generation.given[77] == whole
