"""Completions of several prompts: one answer, with the choices of each prompt in their order."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.conftest import MODEL

pytestmark = pytest.mark.redis
BODY: dict[str, Any] = {
    "model": MODEL, "max_tokens": 4, "temperature": 0, "extra_body": {"ignore_eos": True},
}  # fmt: skip
PROMPTS = ["One", "Two", "Three"]


async def test_several_prompts_have_the_choices_that_each_has_alone(client: Any) -> None:
    alone = [await client.completions.create(**BODY, n=2, prompt=each, seed=1) for each in PROMPTS]
    joined = await client.completions.create(**BODY, n=2, prompt=PROMPTS, seed=1)
    texts = [choice.text for each in alone for choice in each.choices]
    assert [choice.text for choice in joined.choices] == texts
    assert [choice.index for choice in joined.choices] == list(range(6))
    assert joined.usage.completion_tokens == 24
    assert joined.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    tokens = await client.completions.create(**BODY, prompt=[[1, 2, 3], [4, 5]])
    assert (tokens.usage.prompt_tokens, len(tokens.choices)) == (5, 2)
    one = await client.completions.create(**BODY, prompt=["One"])
    assert (
        one.choices[0].text
        == (await client.completions.create(**BODY, prompt="One")).choices[0].text
    )


async def test_a_stream_of_several_prompts_has_the_same_choices_and_one_usage(client: Any) -> None:
    whole = await client.completions.create(**BODY, prompt=PROMPTS)
    # OpenAI's type of a completion does not know the null before its end
    lenient = openai.AsyncOpenAI(base_url=client.base_url, api_key="none")
    stream = await lenient.completions.create(
        **BODY, prompt=PROMPTS, stream=True, stream_options={"include_usage": True}
    )
    texts, ends, usages = dict.fromkeys(range(3), ""), [], []
    async for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
        usages += [event.usage] if event.usage else []
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert sorted(ends) == [0, 1, 2]
    assert [(used.completion_tokens, used.prompt_tokens) for used in usages] == [
        (12, whole.usage.prompt_tokens)
    ]
    await lenient.close()


async def test_several_prompts_with_an_idempotency_key_are_answered_once(client: Any) -> None:
    body = BODY | {"temperature": 1, "extra_headers": {"Idempotency-Key": "k"}}
    first = await client.completions.create(**body, prompt=PROMPTS)
    again = await client.completions.create(**body, prompt=PROMPTS)
    assert (again.id, again.choices) == (first.id, first.choices)
    for other in (PROMPTS[:2], [*PROMPTS, "Four"], "One"):
        with pytest.raises(openai.UnprocessableEntityError):
            await client.completions.create(**body, prompt=other)


async def test_wrong_prompts_are_refused_in_a_sentence(client: Any) -> None:
    for prompt, says in (
        (["x"] * 129, "128 prompts"),
        ([], "prompt"),
        (["x", 1], "prompt"),
        (["x", None], "prompt"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            await client.completions.create(**BODY, prompt=prompt)
