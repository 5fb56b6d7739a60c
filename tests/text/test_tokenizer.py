"""Prompts and chats to ids, on real tokenizers; long texts leave other threads alone."""

import sys
import threading

import pytest
from transformers import AutoTokenizer

from tests.support.tokenizers import byte_level, gemma3, llama_like, metaspace, smollm2
from tests.support.tokenizers import vocabulary as vocabulary_of
from tokenmill_schemas.chat import Message
from tokenmill_worker.engines.own.model.model_files import resolve
from tokenmill_worker.text.chat.templates import TemplateError
from tokenmill_worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(600)
CHAT = (Message("system", "Be brief."), Message("user", "Why is the sky blue?"))


def encode_chat(tokenizer: Tokenizer, chat: tuple[Message, ...]) -> tuple[int, ...]:
    return tokenizer.encode(tokenizer.template.render(chat))


async def test_an_encoded_chat_equals_transformers():
    theirs = AutoTokenizer.from_pretrained(str(resolve("smollm2-135m-instruct")))
    expected = theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in CHAT],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(encode_chat(smollm2(), CHAT)) == expected
    assert smollm2().template.render(CHAT).endswith("<|im_start|>assistant\n")


async def test_a_prompt_begins_with_the_model_s_special_tokens():
    assert gemma3().encode("Hello", special=True)[0] == 2  # <bos>
    ids = smollm2().encode("Hello world", special=True)
    assert smollm2().decode(ids) == "Hello world"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("make", [byte_level, llama_like, metaspace, smollm2, gemma3])
def test_token_ids_equal_transformers(make, special):
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
        encode_chat(gemma3(), CHAT)
    strict = Tokenizer(byte_level()._tokenizer, "{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(TemplateError, match=r"refuses the messages: roles must$"):
        encode_chat(strict, CHAT)


async def test_a_given_template_replaces_the_model_s():
    other = Tokenizer(
        byte_level()._tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}!"
    )
    assert other.decode(encode_chat(other, CHAT)) == "Be brief.Why is the sky blue?!"


def test_other_threads_run_while_a_text_is_tokenised():
    text = "some words " * 100_000
    turns, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal turns
        while not is_over.is_set():
            turns += 1

    tokenizer = smollm2()
    ticking = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # few turns before and after the call
    try:
        ticking.start()
        before = turns
        found = tokenizer.encode(text)
        num_turns = turns - before
    finally:
        is_over.set()
        ticking.join()
        sys.setswitchinterval(interval)
    assert len(found) == 200_001  # "some" and " some" differ, and the last space stands alone
    assert num_turns > 300_000


def test_end_of_sequence_ids_are_read_from_the_tokenizer():
    assert smollm2().eos_token_ids == {2}
    assert gemma3().eos_token_ids == {1}


@pytest.mark.parametrize("make", [byte_level, llama_like, smollm2, gemma3])
def test_the_vocabulary_s_bytes_spell_every_text(make):
    tokenizer = make()
    vocabulary = vocabulary_of(tokenizer)
    assert len(vocabulary) == tokenizer.vocab_size
    text = 'naïve 日本 {"a": 1}\n'
    spelled = b"".join(vocabulary[i] for i in tokenizer.encode(text)).decode()
    assert spelled == (" " + text if make is llama_like else text)
    for special in tokenizer._special:
        assert vocabulary[special] == b""
