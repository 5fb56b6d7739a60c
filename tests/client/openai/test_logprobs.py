"""A stream's chunks give the same log-probabilities as the result of the job, with each token's own
text and bytes.
"""

from collections.abc import Iterable

import msgspec
import pytest

from tests.client.bulk.support import result
from tokenmill.openai.logprobs import chat_logprobs, text_logprobs
from tokenmill.operations.stream_position import StreamPosition
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import TokenLogprob
from tokenmill_schemas.openai import TokenLogprobs
from tokenmill_schemas.result import ChoiceResult, JobResult, ScoredPrompt

JOB = result("batch_abc", 4)
PLAIN = JOB.choices[0]
THINKING = msgspec.structs.replace(
    PLAIN, text="☁", text_ends=(0, 1), reasoning="Hm", reasoning_ends=(2,)
)


def chunks_of(choice: ChoiceResult, tokens_each: int) -> list[Chunk]:
    """Return the chunks of a stream: those of a finished job, or one with all tokens."""
    job: JobResult = msgspec.structs.replace(JOB, choices=(choice,))
    if tokens_each == 1:
        return list(StreamPosition(JOB.job_id).accept_result(job))
    names = ("token_ids", "text", "text_ends", "reasoning", "reasoning_ends", "logprobs")
    parts = {name: getattr(choice, name) for name in names}
    return [Chunk(job_id=JOB.job_id, index=0, **parts)]


def joined(chunks: Iterable[Chunk]) -> list[TokenLogprobs]:
    found = (chat_logprobs(chunk) for chunk in chunks)
    return [entry for logprobs in found if logprobs for entry in logprobs.content]


@pytest.mark.parametrize("tokens_each", [1, 2])
@pytest.mark.parametrize("choice", [PLAIN, THINKING], ids=["text", "thoughts and text"])
def test_a_streams_log_probabilities_are_those_of_the_result(
    choice: ChoiceResult, tokens_each: int
) -> None:
    chunks = chunks_of(choice, tokens_each)
    known = chat_logprobs(choice)
    assert known is not None
    assert joined(chunks) == known.content
    found = [text_logprobs(chunk, None) for chunk in chunks]
    assert [name for one in found if one for name in one.tokens] == ["Hi ", "☁"]


def test_tokens_of_a_part_of_a_character_are_written_as_escapes_beside_their_bytes() -> None:
    entries = (
        TokenLogprob(-0.5, ((5, -0.5), (6, -1.5)), b"\xf0\x9f", (b"\xf0\x9f", b" \xe2\x98")),
        TokenLogprob(-0.25, (), b"\x98\x80"),
        TokenLogprob(-2.0, ((2, -0.5),), b"!", (b"<|im_end|>",)),
    )
    choice = ChoiceResult(text="😀!", token_ids=(5, 8, 9), text_ends=(0, 1, 2), logprobs=entries)
    chat, text = chat_logprobs(choice), text_logprobs(choice, None)
    assert chat is not None
    assert text is not None
    first, second, last = chat.content
    assert [(one.token, one.bytes) for one in first.top_logprobs] == [
        ("\\xf0\\x9f", [0xF0, 0x9F]),
        (" \\xe2\\x98", [0x20, 0xE2, 0x98]),
    ]
    assert bytes(first.bytes + second.bytes + last.bytes).decode() == choice.text
    assert [one.token for one in last.top_logprobs] == ["<|im_end|>"]
    assert text.tokens == ["\\xf0\\x9f", "\\x98\\x80", "!"]
    assert text.top_logprobs[0] == {"\\xf0\\x9f": -0.5, " \\xe2\\x98": -1.5}
    assert text.text_offset == [0, 0, 1]


def test_of_two_likely_tokens_with_one_text_a_completion_has_the_likelier() -> None:
    entry = TokenLogprob(-0.5, ((5, -0.5), (6, -1.5)), b"a", (b"a", b"a"))
    choice = ChoiceResult(text="a", token_ids=(5,), text_ends=(1,), logprobs=(entry,))
    found = text_logprobs(choice, None)
    assert found is not None
    assert found.top_logprobs == [{"a": -0.5}]


def without_bytes(entries: tuple[TokenLogprob, ...] | None) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(entry.logprob, entry.top) for entry in entries or ())


@pytest.mark.parametrize("tokens_each", [1, 2])
@pytest.mark.parametrize("choice", [PLAIN, THINKING], ids=["text", "thoughts and text"])
def test_tokens_without_bytes_have_their_part_of_the_text_and_alternatives_their_ids(
    choice: ChoiceResult, tokens_each: int
) -> None:
    """Such are the results and chunks that were written before workers named bytes."""
    old = msgspec.structs.replace(choice, logprobs=without_bytes(choice.logprobs))
    first, second = joined(chunks_of(old, tokens_each))
    name = "Hm" if choice is THINKING else "Hi "
    assert (first.token, bytes(first.bytes).decode(), first.logprob) == (name, name, -0.5)
    assert (second.token, bytes(second.bytes).decode(), second.logprob) == ("☁", "☁", -0.25)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [
        (name, -0.5),
        ("token_id:8", -2.0),
    ]
    assert [(top.token, top.bytes) for top in second.top_logprobs] == [
        ("☁", list("☁".encode())),
        ("token_id:3", []),
    ]
    found = [one for chunk in chunks_of(old, tokens_each) if (one := text_logprobs(chunk, None))]
    assert [token for one in found for token in one.tokens] == [name, "☁"]
    assert [tops for one in found for tops in one.top_logprobs] == [
        {name: -0.5, "token_id:8": -2.0},
        {"☁": -0.25, "token_id:3": -4.0},
    ]


def test_an_echoed_prompt_without_bytes_has_its_part_of_the_text() -> None:
    prompt = ScoredPrompt((1, 2), (TokenLogprob(-3.0, ((2, -3.0), (4, -0.5))),), (2, 4))
    entries = (TokenLogprob(-0.25, ((7, -0.25), (8, -2.0))),)
    choice = ChoiceResult(text="ab c!", token_ids=(7,), text_ends=(5,), logprobs=entries)
    found = text_logprobs(choice, prompt)
    assert found is not None
    assert found.tokens == ["ab", " c", "!"]
    assert found.token_logprobs == [None, -3.0, -0.25]
    assert found.top_logprobs == [
        None,
        {" c": -3.0, "token_id:4": -0.5},
        {"!": -0.25, "token_id:8": -2.0},
    ]
    assert found.text_offset == [0, 2, 4]


def test_a_token_with_neither_bytes_nor_a_place_in_the_text_is_named_by_its_id() -> None:
    entries = (TokenLogprob(-0.5, ((5, -0.5), (6, -1.5))), TokenLogprob(-0.25))
    choice = ChoiceResult(text="ab", token_ids=(5, 9), logprobs=entries)
    found = chat_logprobs(choice)
    assert found is not None
    assert [(one.token, one.bytes) for one in found.content] == [
        ("token_id:5", []),
        ("token_id:9", []),
    ]
    assert [top.token for top in found.content[0].top_logprobs] == ["token_id:5", "token_id:6"]
