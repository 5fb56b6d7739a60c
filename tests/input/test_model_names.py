"""Tests of the names of a model and its adapters in jobs, and of the refusal of other names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.publish.support import MODEL, Clock, delivery_of
from tests.support.tokenizers import byte_level
from tokenmill_schemas.chat import Message
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import AdmittedJob, FinishedJob
from tokenmill_worker.settings.model_names import naming_problems
from tokenmill_worker.text.tokenizer import Tokenizer


@pytest.fixture
def processor() -> InputProcessor:
    served = dataclasses.replace(
        MODEL,
        adapters=frozenset({"sql", "poet"}),
        aliases={"gpt-4o-mini": MODEL.names[0], "my-lora": "poet", "default-lora": "sql"},
    )
    return InputProcessor(byte_level(), served, clock=Clock())


def test_a_queue_named_after_its_model_is_no_further_name() -> None:
    aliases = {"chat": "tiny", "rhymes": "poet"}
    served = dataclasses.replace(MODEL, names=("tiny", "tiny"), aliases=aliases)
    assert served.further_names == aliases
    other = dataclasses.replace(served, names=("tiny", "q"))
    assert other.further_names == {"q": "tiny"} | aliases


def job(model: str = "", lora: str = "") -> JobRequest:
    return JobRequest(job_id="job", prompt="hi", model=model, params=SamplingParams(lora=lora))


@pytest.mark.parametrize(
    ("model", "lora", "adapter"),
    [
        ("", "", ""),
        (MODEL.names[0], "", ""),
        ("gpt-4o-mini", "", ""),
        ("poet", "", "poet"),
        ("my-lora", "", "poet"),
        ("", "sql", "sql"),
        ("gpt-4o-mini", "default-lora", "sql"),
        ("my-lora", "poet", "poet"),
    ],
)
async def test_each_served_name_selects_the_model_or_its_adapter(
    processor: InputProcessor, model: str, lora: str, adapter: str
) -> None:
    admitted = processor.process(delivery_of(job(model, lora)))
    assert isinstance(admitted, AdmittedJob)
    assert admitted.generation.params.lora == adapter
    assert admitted.request == job(model, lora), "what is recorded is what was asked"


@pytest.mark.parametrize(
    ("model", "lora", "words"),
    [
        ("gpt-5", "", "model 'gpt-5' is not served here; this queue serves"),
        (
            "gpt-5",
            "",
            "(and as adapters or aliases: default-lora, gpt-4o-mini, my-lora, poet, sql)",
        ),
        ("", "poems", "lora 'poems' is not served here; this queue's adapters: poet, sql"),
        ("", MODEL.names[0], "is not served here; this queue's adapters"),
        ("my-lora", "sql", "model 'my-lora' is the adapter 'poet', but lora asks for 'sql'"),
    ],
)
async def test_a_job_with_an_unserved_name_fails_with_the_served_names(
    processor: InputProcessor, model: str, lora: str, words: str
) -> None:
    outcome = processor.process(delivery_of(job(model, lora)))
    assert isinstance(outcome, FinishedJob)
    error = outcome.result.error
    assert error is not None
    assert error.code == "model_not_found"
    assert words in error.message


async def test_a_template_from_a_file_replaces_the_models_own() -> None:
    chat = JobRequest(job_id="job", messages=(Message("user", "hi"),))
    own = byte_level()
    replaced = Tokenizer(
        own._tokenizer, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    rendered = []
    for tokenizer in (own, replaced):
        admitted = InputProcessor(tokenizer, MODEL, clock=Clock()).process(delivery_of(chat))
        assert isinstance(admitted, AdmittedJob)
        rendered.append(
            own._tokenizer.decode(
                list(admitted.generation.prompt.token_ids), skip_special_tokens=False
            )
        )
    assert rendered[0] != rendered[1] == "<user>hi"


def test_wrong_names_and_templates_are_refused_at_the_start(tmp_path: Path) -> None:
    def found(adapters: str = "", aliases: str = "", template: str | None = None) -> list[str]:
        problems = naming_problems({"tiny", "q"}, adapters, aliases, template)
        return [f"{name} {sentence}" for name, sentence in problems]

    assert found("poet=/x", "a=tiny, b=q, c=poet") == []
    assert found("poet=/x", "a=poem") == ["aliases leads 'a' to 'poem'; there are poet, q, tiny"]
    assert found(aliases="a") == ["aliases must be name=target,name=target, not 'a'"]
    assert found("tiny=/x") == ["adapters must not take the model's own name 'tiny'"]
    assert found(template=str(tmp_path / "none")) == [
        f"chat_template cannot be read: {tmp_path / 'none'}: No such file or directory"
    ]
    (tmp_path / "empty").touch()
    assert found(template=str(tmp_path / "empty")) == [
        f"chat_template is an empty file: {tmp_path / 'empty'}"
    ]
