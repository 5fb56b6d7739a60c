"""Log-probabilities of prompts and scores of continuations, through the whole worker, beside one
forward pass of Transformers over the same tokens.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.generation import TokenLogprob

pytestmark = [pytest.mark.redis, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "smollm2-135m-instruct"
TOLERANCE = 1e-4
PROMPT = ("Rivers carry water from the hills to the sea, and mills stand beside them. " * 6).strip()
CONTINUATIONS = [" Grain", " Stones grind grain into flour.", " A river is a road that moves"]


class Truth:
    """Transformers' model and tokenizer."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from tokenmill_worker.engines.own.model.model_files import resolve

        path = resolve(NAME)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token but the first."""
        import torch

        with torch.inference_mode():
            rows = self._model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [float(rows[i, token]) for i, token in enumerate(ids[1:])]


def values(entries: tuple[TokenLogprob, ...] | None) -> list[float]:
    return [entry.logprob for entry in entries or ()]


def bytes_of(entries: tuple[TokenLogprob, ...] | None) -> bytes:
    return b"".join(entry.token_bytes for entry in entries or ())


async def test_prompts_and_continuations_have_transformers_values(
    redis_url: str, tmp_path: Path
) -> None:
    database = database_url(tmp_path)
    model: dict[str, Any] = {
        "model": NAME,
        "dtype": "float32",
        "max_memory_gib": 0.2,
        "num_threads": 1,
    }
    async with (
        running_worker(redis_url, database, lease_seconds=10, **model),
        client_of(redis_url, database) as client,
    ):
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
        plain = await client.result(await client.submit(**asked), timeout=120)
        job = await client.submit(**asked, prompt_logprobs=1, logprobs=True, echo=True)
        first, *others = [chunk async for chunk in client.stream(job)]
        scored = await client.result(job, timeout=120)
        compared = await client.score(CONTINUATIONS, prompt=PROMPT, timeout=120)
    truth = Truth()
    ids: list[int] = truth.tokenizer(PROMPT)["input_ids"]
    assert scored.prompt is not None
    assert scored.prompt == first.prompt
    assert all(chunk.prompt is None for chunk in others)
    assert scored.prompt.token_ids == tuple(ids)
    wanted = truth.logprobs([*ids, *scored.token_ids])
    assert scored.token_ids == plain.token_ids
    assert scored.text == PROMPT + plain.text
    found = values(scored.prompt.logprobs) + values(scored.logprobs)
    assert found == pytest.approx(wanted, abs=TOLERANCE)
    first_token = truth.tokenizer.decode(ids[:1])
    assert bytes_of(scored.prompt.logprobs) == PROMPT.removeprefix(first_token).encode()
    assert bytes_of(scored.logprobs) == plain.text.encode()
    for entry in scored.prompt.logprobs:
        assert entry.top_bytes == (truth.tokenizer.decode([entry.top[0][0]]).encode(),)
    assert (plain.usage.cached_tokens, scored.usage.cached_tokens) == (0, 0)
    for choice, text in zip(compared.choices, CONTINUATIONS, strict=True):
        whole = truth.tokenizer(PROMPT + text)["input_ids"]
        assert (*ids, *choice.token_ids) == tuple(whole)
        assert choice.text == text
        assert values(choice.logprobs) == pytest.approx(
            truth.logprobs(whole)[len(ids) - 1 :], abs=TOLERANCE
        )
    assert compared.usage.cached_tokens > len(ids) - 20
