"""Prompts and chats to ids, on real tokenizers; long texts leave the event loop alone."""

import asyncio

import pytest
from transformers import AutoTokenizer

from tests.support.tokenizers import byte_level, gemma3, llama_like, metaspace, smollm2
from tests.support.tokenizers import vocabulary as vocabulary_of
from tokenmill_schemas.chat import Message
from tokenmill_worker.engine.model.model_files import resolve
from tokenmill_worker.text.chat.templates import TemplateError
from tokenmill_worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(600)
CHAT = (Message("system", "Be brief."), Message("user", "Why is the sky blue?"))


async def encode_chat(tokenizer: Tokenizer, chat: tuple[Message, ...]) -> tuple[int, ...]:
    return await tokenizer.encode_rendered(tokenizer.template.render(chat))


async def test_a_chat_is_what_transformers_makes_of_it():
    theirs = AutoTokenizer.from_pretrained(str(resolve("smollm2-135m-instruct")))
    expected = theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in CHAT],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(await encode_chat(smollm2(), CHAT)) == expected
    assert smollm2().template.render(CHAT).endswith("<|im_start|>assistant\n")


async def test_a_prompt_gets_the_models_own_beginning():
    assert (await gemma3().encode_prompt("Hello"))[0] == 2  # <bos>
    ids = await smollm2().encode_prompt("Hello world")
    assert smollm2().decode(ids) == "Hello world"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("make", [byte_level, llama_like, metaspace, smollm2, gemma3])
def test_ids_are_those_that_transformers_gives(make, special):
    tokenizer = make()
    for text in (
        "",
        "Hello world",
        " two  spaces\n",
        "é 日本 🙂",
        "<|im_start|>user <end><pad> </s>",
        "a" * 500,
    ):
        expected = tokenizer._tokenizer.encode(text, add_special_tokens=special)
        assert list(tokenizer.encode(text, special)) == expected, text


async def test_no_template_and_a_refusing_template_are_errors_of_one_sentence():
    with pytest.raises(TemplateError, match="no chat template"):
        await encode_chat(gemma3(), CHAT)
    strict = Tokenizer(byte_level()._tokenizer, "{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(TemplateError, match=r"refuses the messages: roles must$"):
        await encode_chat(strict, CHAT)


async def test_a_given_template_replaces_the_models_own():
    other = Tokenizer(
        byte_level()._tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}!"
    )
    assert other.decode(await encode_chat(other, CHAT)) == "Be brief.Why is the sky blue?!"


async def test_the_event_loop_goes_on_while_a_long_prompt_is_tokenised():
    tokenizer = smollm2()
    text = "some words " * 100_000
    turns = 0

    async def tick():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticking = asyncio.create_task(tick())
    ids = await tokenizer.encode_prompt(text)
    ticking.cancel()
    assert len(ids) == 200_001  # "some" and " some" differ, and the last space stands alone
    assert turns > 10, "in one pause of the whole time there would be none"


def test_end_of_sequence_ids():
    assert smollm2().eos_token_ids == {2}
    assert gemma3().eos_token_ids == {1}


@pytest.mark.parametrize("make", [byte_level, llama_like, smollm2, gemma3])
def test_the_vocabulary_spells_every_text(make):
    tokenizer = make()
    vocabulary = vocabulary_of(tokenizer)
    assert len(vocabulary) == tokenizer.vocab_size
    text = 'naïve 日本 {"a": 1}\n'
    spelled = b"".join(vocabulary[i] for i in tokenizer.encode(text)).decode()
    assert spelled == (" " + text if make is llama_like else text)
    for special in tokenizer._special:
        assert vocabulary[special] == b""


@pytest.mark.parametrize("text", ["", "a", " " * 5000, "abcabc" * 50, "<user>" * 40, "é日" * 30])
@pytest.mark.parametrize("make", [byte_level, llama_like, metaspace, smollm2])
def test_no_encoding_is_shorter_than_the_least(make, text):
    assert make().least_tokens(text) <= len(make().encode(text))


def test_the_least_is_no_empty_promise():
    assert smollm2().least_tokens("x" * 10_000_000) > 10_000
