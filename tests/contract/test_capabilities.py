"""A request that asks for what an engine lacks is refused by name."""

import pytest

from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.contract.capabilities import STRUCTURED, Capabilities

EVERYTHING = Capabilities(
    structured=STRUCTURED, tool_grammars=True, thinking_budget=True, scores=True,
    prompt_logprobs=True, adapters=True,
)  # fmt: skip
ASKED = [
    ({"response_format": ResponseFormat(regex="a+")}, {}, "response_format.regex"),
    ({"response_format": ResponseFormat(json_schema={})}, {}, "response_format.json_schema"),
    ({"response_format": ResponseFormat(grammar="root ::= 1")}, {}, "response_format.grammar"),
    ({"response_format": ResponseFormat(structural_tag={})}, {}, "response_format.structural_tag"),
    ({}, {"calls_tools": True}, "tools"),
    ({"thinking_budget": 0}, {}, "thinking_budget"),
    ({}, {"scores": True}, "continuations"),
    ({"prompt_logprobs": 0}, {}, "prompt_logprobs"),
    ({"echo": True, "logprobs": True}, {}, "echo with log-probabilities"),
    ({"lora": "poet"}, {}, "lora"),
]


@pytest.mark.parametrize(("params", "more", "name"), ASKED, ids=[name for *_, name in ASKED])
def test_an_engine_without_an_ability_refuses_a_request_for_it_by_name(params, more, name):
    asked = SamplingParams(**params)
    assert EVERYTHING.problems(asked, **more) == []
    assert Capabilities().problems(asked, **more) == [
        f"{name} is not available on the engine of this queue"
    ]


def test_a_plain_request_suits_every_engine():
    assert Capabilities().problems(SamplingParams(temperature=2.0, logprobs=True, n=3)) == []


@pytest.mark.parametrize(("temperature", "is_taken"), [(None, True), (2.0, True), (2.1, False)])
def test_a_parameter_beyond_the_limits_of_an_engine_is_refused_with_both_numbers(
    temperature, is_taken
):
    engine = Capabilities(limits={"temperature": (0.0, 2.0)})
    found = engine.problems(SamplingParams(temperature=temperature))
    wanted = "temperature must be between 0 and 2 with the engine of this queue, not 2.1"
    assert found == ([] if is_taken else [wanted])


def test_the_words_for_people_name_each_ability_and_each_bound():
    engine = Capabilities(
        structured=("regex",), adapters=True, media=("image",), limits={"temperature": (0.0, 2.0)}
    )
    wanted = ["response_format.regex", "adapters", "image", "temperature 0 to 2"]
    assert engine.words() == wanted
