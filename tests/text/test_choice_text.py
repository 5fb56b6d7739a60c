"""One choice's text: stop strings across tokens, what is billed, and replay at every point."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tokenizers import byte_level, gemma3, llama_like, smollm2
from tokenmill_worker.text.choice_text import TextStream

LETTERS = b"ab\xc3\xa9\n "


def push_all(stream, ids):
    for token_id in ids:
        stream.push(token_id)


def stream_of(tokenizer, ids, stop=(), min_tokens=0):
    stream = TextStream(tokenizer.detokenizer(), stop, min_tokens)
    push_all(stream, ids)
    return stream


def state(stream):
    return (
        stream.token_ids,
        stream.pieces,
        stream.rest,
        stream.text,
        stream.text_ends,
        stream.stopped,
    )


@st.composite
def outputs(draw):
    family = draw(st.sampled_from([byte_level, llama_like]))
    shift = 0 if family is byte_level else 1  # <unk> comes first
    ids = draw(st.lists(st.sampled_from([byte + shift for byte in LETTERS]), max_size=30))
    stops = draw(st.lists(st.text("abé\n", min_size=1, max_size=4), max_size=3))
    return family(), ids, tuple(stops)


@given(outputs())
def test_the_text_ends_before_its_first_stop_string(output):
    tokenizer, ids, stops = output
    stream = stream_of(tokenizer, ids, stops)
    stream.close()
    whole = tokenizer.decode(ids)
    found = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    assert stream.stopped == bool(found)
    assert stream.text == (whole[: min(found)[1]] if found else whole)
    assert "".join(stream.pieces) == stream.text
    assert [stream.text[:end] for end in stream.text_ends][-1:] == (
        [stream.text] if stream.pieces else []
    )


@given(outputs())
def test_the_token_that_completes_a_stop_string_is_the_last_one_billed(output):
    tokenizer, ids, stops = output
    stream = stream_of(tokenizer, ids, stops)
    if not stream.stopped:
        assert stream.token_ids == ids
        return
    billed = len(stream.token_ids)
    # One token fewer does not contain a stop string, even with what was still held back.
    assert not any(stop in text_of(tokenizer, ids[: billed - 1]) for stop in stops)
    assert any(stop in text_of(tokenizer, ids[:billed]) for stop in stops)


def text_of(tokenizer, ids):
    """Return the certain text of these tokens, without any stop string to look for."""
    return "".join(stream_of(tokenizer, ids).pieces)


@given(outputs(), st.booleans())
def test_replay_at_every_point_equals_an_undisturbed_run(output, close):
    tokenizer, ids, stops = output
    undisturbed = stream_of(tokenizer, ids, stops)
    if close:
        undisturbed.close()
    for cut in range(len(undisturbed.token_ids) + 1):
        first = stream_of(tokenizer, ids[:cut], stops)
        resumed = TextStream(tokenizer.detokenizer(), stops)
        push_all(resumed, first.token_ids)
        assert state(resumed) == state(first)
        push_all(resumed, ids[cut:])
        if close:
            resumed.close()
        assert state(resumed) == state(undisturbed)


def test_tokens_after_the_stop_string_are_ignored():
    tokenizer = byte_level()
    stream = stream_of(tokenizer, list(b"one\ntwo"), ["\n"])
    assert (stream.text, bytes(stream.token_ids)) == ("one", b"one\n")
    assert stream.push(ord("x")) == ""
    assert stream.close() == ""
    assert bytes(stream.token_ids) == b"one\n"


def test_stop_strings_before_min_tokens_are_ignored():
    tokenizer = byte_level()
    stream = stream_of(tokenizer, list(b"a.b.c.d"), ["."], min_tokens=4)
    assert (stream.text, len(stream.token_ids)) == ("a.b", 4)


def test_held_back_text_belongs_to_the_last_token_or_to_the_rest():
    for with_last, ends, rest in ((True, (1, 4), ""), (False, (1, 1), "##\ufffd")):
        stream = TextStream(byte_level().detokenizer(), ["##!"])
        stream.push(ord("x"))
        assert [stream.push(token) for token in b"##"] == ["", ""]
        stream.token_ids.pop(), stream.pieces.pop()
        stream._detokenizer.push(0xE2)
        assert stream.close(with_last_token=with_last) == "##\ufffd"
        assert (stream.text_ends, stream.rest) == (ends, rest)
        assert stream.text == "x##\ufffd"
        assert stream.close() == ""


def test_the_flushed_end_may_complete_a_stop_string():
    stream = stream_of(byte_level(), [ord("a"), 0xE2], ["\ufffd"])
    assert not stream.stopped
    stream.close()
    assert stream.stopped
    assert stream.text == "a"


@pytest.mark.timeout(600)
def test_a_stop_string_across_token_borders_is_found():
    tokenizer = smollm2()
    text = "Sure! Here is a list:\n1. apples\n2. pears"
    ids = tokenizer.encode(text)
    for stop in ("is a li", "!", "les\n2", "\n", "rs", " "):
        stream = stream_of(tokenizer, ids, [stop])
        assert stream.text == text[: text.find(stop)]
        assert stream.stopped


@pytest.mark.parametrize("load", [byte_level, gemma3, smollm2])
def test_an_echoed_prompt_precedes_the_answer_and_is_not_searched_for_stops(load):
    tokenizer = load()
    prompt, answer = tokenizer.encode("é stop here"), tokenizer.encode(" and on")
    stream = TextStream(tokenizer.detokenizer(), ("stop", "and o"))
    ends = stream.echo(prompt)
    push_all(stream, answer)
    whole = tokenizer.decode([*prompt, *answer])
    assert stream.stopped
    assert stream.text == whole[: whole.index("and o")]
    assert len(ends) == len(prompt)
    assert whole[: ends[-1]] == tokenizer.decode(prompt)
    assert stream.pieces[0].startswith(tokenizer.decode(prompt))


def test_an_echoed_prompt_without_an_answer_is_the_rest():
    stream = TextStream(byte_level().detokenizer())
    assert stream.echo(b"hi\xc3") == (1, 2, 2)
    stream.close(with_last_token=False)
    assert (stream.rest, stream.text) == ("hi\ufffd", "hi\ufffd")
    stream = TextStream(byte_level().detokenizer())
    stream.echo(b"hi\xc3")
    stream.push(0xA9)
    assert stream.pieces == ["hié"]
