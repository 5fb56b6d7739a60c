"""Adapters from the outside: a job names one as its model, or by `lora`; a worker without it says
so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.own.lora.support import save_adapter
from tests.engines.own.truth import tiny_models
from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.result import JobStatus

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Save a tiny model with the tokenizer of the model-free engine, whose ids fit."""
    from tokenmill_worker.engines.synthetic.runner import TOKENIZER

    folder = tiny_models.save("llama", tmp_path / "base")
    for file in TOKENIZER.glob("tokenizer*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


async def test_jobs_choose_the_base_or_an_adapter_by_name(
    redis_url: str, tmp_path: Path, model: Path
) -> None:
    database = database_url(tmp_path)
    poet = save_adapter(model, tmp_path / "poet", 1)
    settings: dict[str, Any] = {
        "model": str(model), "dtype": "float32", "num_threads": 1, "lease_seconds": 10,
        "adapters": f"poet={poet}", "aliases": f"gpt={model},rhymes=poet",
    }  # fmt: skip
    ask: dict[str, Any] = {"prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    choices: list[dict[str, Any]] = [
        {},
        {"model": "gpt"},
        {"model": "poet"},
        {"model": "rhymes"},
        {"lora": "poet"},
        {"lora": "sonnet"},
    ]
    async with (
        running_worker(redis_url, database, **settings) as worker,
        client_of(redis_url, database) as client,
    ):
        assert worker.service.health.engine_ready
        jobs = [await client.submit(**ask, **choice) for choice in choices]
        base, gpt, as_model, as_alias, as_lora, unknown = [
            await client.result(job, timeout=60) for job in jobs
        ]

        async def has_model() -> bool:  # from the next heartbeat on
            return (await client.workers())[0].model != ""

        await until(has_model)
        [status] = await client.workers()
    assert status.model == str(model)
    assert (status.adapters, status.max_model_len) == (("poet",), 256)
    assert status.aliases == {"q": str(model), "gpt": str(model), "rhymes": "poet"}
    assert base.token_ids == gpt.token_ids
    assert as_model.token_ids == as_alias.token_ids == as_lora.token_ids != base.token_ids
    assert (gpt.model, as_model.model) == ("gpt", "poet")
    assert unknown.status is JobStatus.FAILED
    assert unknown.error is not None
    assert unknown.error.message == "lora 'sonnet' is not served here; this queue's adapters: poet"
