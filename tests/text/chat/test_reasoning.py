"""Thoughts are split from the answer by their tokens, at every cut and after every resume."""

from collections.abc import Sequence

import pytest

from tests.support.tokenizers import byte_level, channels, smollm2, thinking
from tests.text.chat.families import DEEPSEEK, GPT_OSS, QWEN3, SMOLLM3
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.text.chat.reasoning import Opening, detect
from tokenmill_worker.text.job_output import JobOutput
from tokenmill_worker.text.tokenizer import Tokenizer

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


def opening_of(tokenizer: Tokenizer, chat: str, begun: str = "") -> Opening:
    found = tokenizer.reasoning_format("auto")
    assert found is not None
    return found.opening(chat, begun)


def answer_of(
    tokenizer: Tokenizer, chat: str, ids: Sequence[int], stop: tuple[str, ...] = ()
) -> JobOutput:
    params = SamplingParams(stop=stop)
    output = JobOutput.start(tokenizer, params, opening_of(tokenizer, chat))
    for token_id in ids:
        output.push(0, (token_id,))
    return output


def read(tokenizer: Tokenizer, chat: str, text: str, stop: tuple[str, ...] = ()) -> tuple[str, str]:
    output = answer_of(tokenizer, chat, tokenizer.encode(text), stop)
    output.end(0, FinishReason.STOP, with_last_token=True)
    (result,) = output.results()
    return result.reasoning, result.text


@pytest.mark.parametrize(
    ("chat", "text", "expected"),
    [
        ("[assistant]", "<think>\nHm é.</think>\n\nYes", ("Hm é.", "Yes")),
        ("[assistant]", "Yes\n", ("", "Yes\n")),
        ("[assistant]", "\n\nYes", ("", "\n\nYes")),
        ("[assistant]", "Yes <think>no</think>", ("", "Yes <think>no</think>")),
        ("[assistant]", "<think></think>Yes", ("", "Yes")),
        ("[assistant]<think>\n", "Hm</think>Yes", ("Hm", "Yes")),
        ("[assistant]<think>\n", "Hm and no end", ("Hm and no end", "")),
        ("[assistant]<think>\n</think>\n", "Yes", ("", "Yes")),
        ("[assistant]<think>\n</think>\n", "<think>a</think>", ("", "<think>a</think>")),
    ],
)
def test_thoughts_between_tags_are_split_from_the_answer(
    chat: str, text: str, expected: tuple[str, str]
) -> None:
    assert read(thinking(), chat, text) == expected


@pytest.mark.parametrize(
    ("chat", "text", "expected"),
    [
        ("<|start|>assistant", f"{ANALYSIS}Hm é.{FINAL}Yes<|return|>", ("Hm é.", "Yes<|return|>")),
        ("<|start|>assistant", "<|channel|>final<|message|>Yes", ("", "Yes")),
        ("<|start|>assistant", "<|channel|>commentary<|message|>I ask", ("", "I ask")),
        ("<|start|>assistant", f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b", ("ab", "")),
        (f"<|start|>assistant{ANALYSIS}so", f" far{FINAL}Yes", (" far", "Yes")),
        ("<|start|>assistant<|channel|>final<|message|>Ye", "s", ("", "s")),
    ],
)
def test_thoughts_in_channels_are_split_from_the_answer(
    chat: str, text: str, expected: tuple[str, str]
) -> None:
    assert read(channels(), chat, text) == expected


@pytest.mark.parametrize(
    ("before", "begun", "text", "expected"),
    [
        ("", "<think>\nLet me", " add</think>4", (" add", "4")),
        ("", "<think>\nI add.\nSo", " it is</think>4", (" it is", "4")),
        ("", "<think>Hm", "m</think>4", ("m", "4")),
        ("", "<think>\n", "Hm</think>4", ("Hm", "4")),
        ("<think>\n", "Let me", " add</think>4", (" add", "4")),  # the template opened them
        ("", "<think>a</think>The sum", " is 4", ("", " is 4")),
        ("<think>\n\n</think>\n\n", "The sum", " is 4", ("", " is 4")),
        ("", "The sum", " is 4", ("", " is 4")),
        ("", "<think>a</think><think>b", "c</think>4", ("c", "4")),
    ],
)
def test_the_last_mark_of_a_continued_message_decides_whether_its_thoughts_are_open(
    before: str, begun: str, text: str, expected: tuple[str, str]
) -> None:
    chat = f"[user]What is <think>?[assistant]{before}{begun}"
    opening = opening_of(thinking(), chat, begun)
    output = JobOutput.start(thinking(), SamplingParams(), opening)
    for token_id in thinking().encode(text):
        output.push(0, (token_id,))
    output.end(0, FinishReason.STOP, with_last_token=True)
    (result,) = output.results()
    assert (result.reasoning, result.text) == expected
    is_open = expected[0] != ""
    assert (opening.thoughts is not None and opening.thoughts.is_open) == is_open


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_replay_at_any_token_gives_the_same_split(cut: int) -> None:
    ids = thinking().encode("<think>\né STOP.</think>\n\nYes STOP no")
    whole = answer_of(thinking(), "[assistant]", ids, ("STOP",))
    resumed = answer_of(thinking(), "[assistant]", ids[:cut], ("STOP",))
    for token_id in ids[cut:]:
        resumed.push(0, (token_id,))
    assert resumed.results() == whole.results()
    assert resumed.usage(1) == whole.usage(1)


def test_stop_strings_in_thoughts_are_ignored() -> None:
    text = "<think>a STOP b</think>c STOP d"
    assert read(thinking(), "[assistant]", text, ("STOP",)) == ("a STOP b", "c ")
    across = "<think>ST</think>OP d"  # half of it in the thoughts
    assert read(thinking(), "[assistant]", across, ("STOP",)) == ("ST", "OP d")


def test_reasoning_tokens_include_the_marks_of_thoughts() -> None:
    ids = thinking().encode("<think>abc</think>Yes")
    usage = answer_of(thinking(), "[assistant]", ids).usage(1)
    assert (usage.reasoning_tokens, usage.completion_tokens) == (5, 8)


def test_text_ends_and_reasoning_ends_hold_each_token_s_end() -> None:
    ids = thinking().encode("<think>abc</think>Yes")
    (result,) = answer_of(thinking(), "[assistant]", ids).results()
    assert result.reasoning_ends == (0, 1, 2, 3)
    assert result.text_ends == (0, 0, 0, 0, 0, 1, 2, 3)


def test_thoughts_cut_within_a_character_are_kept() -> None:
    ids = thinking().encode("<think>é")[:-1]
    output = answer_of(thinking(), "[assistant]", ids)
    output.end_all(FinishReason.CANCELLED)
    assert output.reasoning_rest == "\ufffd"
    assert output.results()[0].reasoning == "\ufffd"


@pytest.mark.parametrize(
    ("tokenizer", "template", "expected"),
    [
        (thinking, QWEN3, "TagFormat"),
        (thinking, DEEPSEEK, "TagFormat"),
        (thinking, SMOLLM3, "TagFormat"),
        (channels, GPT_OSS, "ChannelFormat"),
        (thinking, GPT_OSS, "NoneType"),
        (byte_level, QWEN3, "NoneType"),
    ],
)
def test_the_format_of_thoughts_is_detected_from_template_and_tokens(
    tokenizer, template, expected
) -> None:
    found = detect(tokenizer()._tokenizer, template, "auto")
    assert type(found).__name__ == expected


def test_a_named_format_of_thoughts_requires_its_tokens() -> None:
    assert thinking().reasoning_format("none") is None
    assert detect(thinking()._tokenizer, "", "think") is not None
    with pytest.raises(ValueError, match="is 'channels', but this model has no tokens that mark"):
        smollm2().reasoning_format("channels")


def test_thoughts_opened_or_closed_by_the_template_are_recognised() -> None:
    def state(chat: str) -> tuple[bool, bool]:
        thoughts = opening_of(thinking(), chat).thoughts
        return thoughts is not None, thoughts is not None and thoughts.is_open

    assert state("[assistant]") == (True, False)
    assert state("[assistant]<think>\n") == (True, True)
    assert state("[assistant]<think>\n\n</think>\n\n") == (False, False)
