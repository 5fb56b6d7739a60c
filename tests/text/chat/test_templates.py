"""Chats become what `apply_chat_template` of Transformers makes of them, byte for byte."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.support.tokenizers import byte_level
from tests.text.chat.families import FAMILIES, GPT_OSS, LLAMA3, PARTS_ONLY, PHI4
from tokenmill.openai.messages import read_messages
from tokenmill_schemas.chat import Message, TextPart
from tokenmill_worker.text.chat.templates import ChatTemplate, TemplateError

Turns = list[dict[str, Any]]
CALL: dict[str, Any] = {"name": "get", "arguments": {"city": "Zürich <&>", "days": [1, 2.0]}}

SYSTEM = {"role": "system", "content": " Be brief. "}
ASKED = {"role": "user", "content": "Why?\n"}
PLAIN: Turns = [SYSTEM, ASKED]
HISTORY: Turns = [
    SYSTEM,
    ASKED,
    {"role": "assistant", "content": "\n<think>x</think>Because."},
    {"role": "user", "content": "And “this”?"},
]
CALLED: Turns = [
    ASKED,
    {
        "role": "assistant",
        "reasoning_content": "\nI look.\n",
        "tool_calls": [{"type": "function", "id": "abcdefghi", "function": CALL}],
    },
    {"role": "tool", "content": "17", "tool_call_id": "abcdefghi"},
]
WITH_CALLS = ("Qwen3", "Llama 3", "Mistral", "Hermes", "gpt-oss")


def chat_of(turns: Turns) -> tuple[Message, ...]:
    fields: dict[str, Any] = {"messages": turns}
    read_messages(fields)
    return msgspec.convert(fields["messages"], tuple[Message, ...])


def theirs(template: str, turns: Turns, **arguments: Any) -> str:
    found = byte_level()._tokenizer.apply_chat_template(
        turns, chat_template=template, tokenize=False, **arguments
    )
    assert isinstance(found, str)
    return found


def ours(template: str, turns: Turns, **arguments: Any) -> str:
    return ChatTemplate(byte_level()._tokenizer, template).render(chat_of(turns), **arguments)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return FAMILIES[str(request.param)]


@pytest.mark.parametrize("turns", [PLAIN, HISTORY], ids=["plain", "history"])
@pytest.mark.parametrize("begins", [True, False])
def test_a_rendered_chat_equals_transformers(family: str, turns: Turns, begins: bool) -> None:
    assert ours(family, turns, add_generation_prompt=begins) == theirs(
        family, turns, add_generation_prompt=begins
    )


def test_an_assistant_message_begins_unless_the_last_is_continued(family: str) -> None:
    assert ours(family, PLAIN) == theirs(family, PLAIN, add_generation_prompt=True)
    for content in ("Because it ", ""):
        turns = [*PLAIN, {"role": "assistant", "content": content}]
        expected = theirs(family, turns, continue_final_message=True)
        assert ours(family, turns, continue_final_message=True) == expected
        assert expected.rstrip().endswith(content.rstrip())


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_thoughts_and_tool_answers_render_as_by_transformers(name: str) -> None:
    assert ours(FAMILIES[name], CALLED) == theirs(
        FAMILIES[name], CALLED, add_generation_prompt=True
    )


@pytest.mark.parametrize("name", ["Qwen3", "gpt-oss"])
def test_thoughts_are_rendered_under_each_family_s_field(name: str) -> None:
    assert "I look." in ours(FAMILIES[name], CALLED)


@pytest.mark.parametrize(
    "variables",
    [{"enable_thinking": False}, {"date_string": "1 May"}, {"reasoning_effort": "high"}],
    ids=str,
)
def test_template_variables_render_as_by_transformers(
    family: str, variables: dict[str, object]
) -> None:
    assert ours(family, PLAIN, variables=variables) == theirs(
        family, PLAIN, add_generation_prompt=True, **variables
    )


def test_variables_change_the_rendered_chat() -> None:
    assert "Today: 1 May" in ours(LLAMA3, PLAIN, variables={"date_string": "1 May"})


def test_documents_render_as_by_transformers(family: str) -> None:
    documents = [{"title": "T", "text": "x"}]
    expected = theirs(family, PLAIN, documents=documents, add_generation_prompt=True)
    assert ours(family, PLAIN, documents=documents) == expected
    assert ("[T]x" in expected) is (family == FAMILIES["SmolLM3"])


def test_message_parts_are_passed_to_templates_that_read_them_and_joined_for_others(
    family: str,
) -> None:
    parts = [{"type": "text", "text": "Why "}, {"type": "text", "text": "now? "}]
    turns: Turns = [{"role": "user", "content": parts}]
    as_text: Turns = [{"role": "user", "content": "Why now? "}]
    expected = turns if family == FAMILIES["Gemma 3"] else as_text
    assert ours(family, turns) == theirs(family, expected, add_generation_prompt=True)


def test_a_template_that_reads_only_parts_gets_texts_as_parts() -> None:
    assert ours(PARTS_ONLY, PLAIN) == "[system] Be brief. [user]Why?\n"


def test_a_developer_message_becomes_a_system_message_if_the_template_lacks_the_role() -> None:
    turns: Turns = [{"role": "developer", "content": "Be brief."}, ASKED]
    assert ours(GPT_OSS, turns) == theirs(GPT_OSS, turns, add_generation_prompt=True)
    assert ours(PHI4, turns).startswith("<|im_start|>system<|im_sep|>Be brief.")


def test_the_template_named_default_is_used_among_several() -> None:
    tokenizer = byte_level()._tokenizer
    kept, tokenizer.chat_template = tokenizer.chat_template, {"default": PHI4, "rag": LLAMA3}
    try:
        found = ChatTemplate(tokenizer).render(chat_of(PLAIN))
    finally:
        tokenizer.chat_template = kept
    assert found == theirs(PHI4, PLAIN, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["tokenize", "messages", "tools", "chat_template"])
def test_a_variable_cannot_replace_an_argument(name: str) -> None:
    with pytest.raises(TemplateError, match=f"^chat_template_kwargs must not set '{name}'$"):
        ours(PHI4, PLAIN, variables={name: "x"})


@pytest.mark.parametrize(
    ("template", "chat", "sentence"),
    [
        ("Mistral", (Message("user", "a"), Message("developer", "b")), None),
        ("Gemma 3", (Message("user", "a"), Message("user", "b")), "roles must alternate"),
    ],
)
def test_a_template_s_own_error_is_the_refusal_s_sentence(
    template: str, chat: tuple[Message, ...], sentence: str | None
) -> None:
    render: Callable[..., str] = ChatTemplate(byte_level()._tokenizer, FAMILIES[template]).render
    if sentence is None:
        assert "[SYSTEM_PROMPT] b" in render(chat)
        return
    with pytest.raises(TemplateError, match=f"refuses the messages: {sentence}"):
        render(chat)


def test_a_message_of_a_single_part_equals_its_text() -> None:
    chat = (Message("user", (TextPart("Why?"),)),)
    assert ChatTemplate(byte_level()._tokenizer, PHI4).render(chat) == ours(
        PHI4, [{"role": "user", "content": "Why?"}]
    )
