"""The real model behind the whole worker, its engine in a process of its own: the text is
Transformers' own.
"""

import pytest

from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.result import JobStatus

pytestmark = [pytest.mark.redis, pytest.mark.model, pytest.mark.timeout(300)]

QUESTIONS = ("Why is the sky blue?", "Name three rivers.", "What is 12 times 12?")


def expected_answers(max_tokens):
    """Return the answers of Transformers' `generate`, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tokenmill_worker.engines.own.model.model_files import resolve

    path = resolve("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    return answers


@pytest.mark.slow
async def test_chat_answers_equal_those_of_generate(redis_url, tmp_path):
    database = database_url(tmp_path)
    model = {
        "model": "smollm2-135m-instruct",
        "dtype": "float32",
        "max_memory_gib": 0.2,
        "num_threads": 1,
    }
    async with (
        running_worker(redis_url, database, in_process=True, lease_seconds=10, **model),
        client_of(redis_url, database) as client,
    ):
        jobs = [
            await client.submit(
                messages=[{"role": "user", "content": q}], max_tokens=24, temperature=0
            )
            for q in QUESTIONS
        ]
        streamed = ["".join([chunk.text async for chunk in client.stream(job)]) for job in jobs]
        results = [await client.result(job, timeout=120) for job in jobs]
    assert {r.status for r in results} == {JobStatus.SUCCEEDED}
    assert [r.text for r in results] == streamed == expected_answers(24)
