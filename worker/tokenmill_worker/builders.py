"""Builds parts of a worker whose construction takes more than one call, from its settings."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec

from tokenmill.transport.server_clock import ServerClock
from tokenmill_worker.contract.host import EngineHost
from tokenmill_worker.contract.messages import Ready, Start
from tokenmill_worker.engines.process.host import EngineProcess
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.input.served_model import ServedModel
from tokenmill_worker.queue.job_stream import StreamOptions
from tokenmill_worker.settings import Settings
from tokenmill_worker.settings.model_names import read_aliases, read_template
from tokenmill_worker.telemetry import Tracing
from tokenmill_worker.telemetry.worker_status import package_version
from tokenmill_worker.text.tokenizer import Tokenizer, import_library


def engine_host(settings: Settings, config: Any) -> EngineHost:
    """Create the host of one engine. While the engine loads, a thread imports what
    `input_processor` needs.
    """
    threading.Thread(target=import_library, name="imports", daemon=True).start()
    start = start_of(config, settings.cache_dir)
    return EngineProcess(start, settings.stall_seconds, python=settings.engine_python)


def start_of(config: Any, cache_dir: str | None = None) -> Start:
    """Return the first frame to an engine's process; `config` has the settings of its kind."""
    return Start(engine=config.kind, settings=msgspec.to_builtins(config), cache_dir=cache_dir)


async def input_processor(settings: Settings, clock: ServerClock, ready: Ready) -> InputProcessor:
    """Load the tokenizer of the model that the engine has loaded. Raises OSError, or
    SettingsError for a `reasoning_format` that the model does not have.
    """
    template = read_template(settings.chat_template)
    tokenizer = await asyncio.to_thread(
        Tokenizer.load, ready.model_path, template, settings.trust_remote_code
    )
    try:
        reasoning = tokenizer.reasoning_format(settings.reasoning_format)
    except ValueError as error:
        raise SettingsError([f"reasoning_format {error}"]) from error
    served = ServedModel(
        names=(settings.model, settings.queue_name),
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=frozenset(ready.eos_token_ids),
        tokenizer_eos=tokenizer.eos_token_ids,
        special_tokens=tokenizer.special_tokens,
        default_max_tokens=settings.default_max_tokens,
        sampling_defaults=ready.sampling_defaults,
        capabilities=ready.capabilities,
        adapters=settings.adapter_names,
        aliases=read_aliases(settings.aliases),
    )
    return InputProcessor(
        tokenizer,
        served,
        worker_id=settings.worker_name,
        max_payload_bytes=settings.max_payload_bytes,
        reasoning=reasoning,
        tool_format=tokenizer.tool_format(settings.tool_format),
        clock=clock,
    )


def stream_options(settings: Settings) -> StreamOptions:
    jobs_per_minute = settings.tenant_jobs_per_minute
    return StreamOptions(
        lease_s=settings.lease_seconds,
        result_ttl_s=round(settings.result_ttl_seconds),
        max_solo_crashes=settings.max_crashes,
        bulk_every=max(1, round(1 / settings.bulk_share)) if settings.bulk_share else 1 << 30,
        queue_limit=settings.queue_limit,
        max_payload_bytes=settings.max_payload_bytes,
        idempotency_ttl_s=settings.idempotency_ttl_seconds,
        tenant_concurrency=settings.tenant_max_running,
        tenant_rate=jobs_per_minute / 60,
        tenant_burst=max(1, round(jobs_per_minute)) if jobs_per_minute else 0,
    )


def open_tracing(settings: Settings) -> Tracing | None:
    """Open tracing if an endpoint is set. Raises MissingPackage without OpenTelemetry."""
    if not settings.otel_endpoint:
        return None
    resource = {
        "service.name": "tokenmill-worker",
        "service.instance.id": settings.worker_name,
        "service.version": package_version(),
    }
    return Tracing.open(settings.otel_endpoint, resource=resource)
