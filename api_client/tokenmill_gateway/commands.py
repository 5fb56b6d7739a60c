"""The commands `tokenmill gateway` and `tokenmill keys`."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import typer

from tokenmill.errors import ConfigurationError
from tokenmill_gateway.key_commands import keys
from tokenmill_gateway.options import (
    DATABASE,
    REDIS,
    DatabaseUrl,
    KeyPrefix,
    KeySecret,
    RedisUrl,
    variable,
)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(keys, name="keys")


@app.command()
def gateway(
    redis_url: RedisUrl = REDIS,
    database_url: DatabaseUrl = DATABASE,
    key_prefix: KeyPrefix = "tm:",
    model: Annotated[
        list[str] | None,
        variable("GATEWAY_MODEL", "NAME=QUEUE, repeatable; without it a queue has its name."),
    ] = None,
    files: Annotated[
        str, variable("FILES", "Folder or s3://BUCKET of files and batches, as of the tasks.")
    ] = "",
    upload_mb: Annotated[
        int, variable("GATEWAY_UPLOAD_MB", "Most megabytes of an uploaded file.", min=1)
    ] = 200,
    batch_lines: Annotated[
        int, variable("GATEWAY_BATCH_LINES", "Most lines of a batch.", min=1)
    ] = 50_000,
    host: Annotated[str, variable("GATEWAY_HOST", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, variable("GATEWAY_PORT", "Port to listen on.")] = 8080,
    is_open: Annotated[
        bool,
        typer.Option(
            "--open", envvar="TOKENMILL_GATEWAY_OPEN", help="Ask for no key; on loopback alone."
        ),
    ] = False,
    key_secret: KeySecret = "",
    answer_seconds: Annotated[
        float, variable("GATEWAY_ANSWER_SECONDS", "Longest wait for a whole answer.")
    ] = 600.0,
    drain_seconds: Annotated[
        float, variable("GATEWAY_DRAIN_SECONDS", "Time for answers to end after SIGTERM.")
    ] = 30.0,
    write_seconds: Annotated[
        float,
        variable("GATEWAY_WRITE_SECONDS", "A reader that takes nothing for so long is left."),
    ] = 60.0,
    processes: Annotated[
        int, variable("GATEWAY_PROCESSES", "Processes that share the port: one per core.")
    ] = 1,
    forwarded_allow_ips: Annotated[
        str,
        variable("GATEWAY_FORWARDED_ALLOW_IPS", "Proxies whose X-Forwarded-For is believed."),
    ] = "127.0.0.1",
    metrics_host: Annotated[
        str, variable("GATEWAY_METRICS_HOST", "Address of /metrics.")
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int | None,
        variable("GATEWAY_METRICS_PORT", "Port of /metrics; each process takes the next one."),
    ] = None,
) -> None:
    """Serve OpenAI's API in front of the queue."""
    from tokenmill_gateway.run import GatewaySettings, run

    queues, problems = _named_queues(model or [])
    if is_open and not _is_loopback(host):
        problems.append(f"--open listens on loopback alone, not on {host}")
    if not 0 < port < 65_536:
        problems.append(f"--port must be from 1 to 65535, not {port}")
    if not 1 <= processes <= 256:
        problems.append(f"--processes must be from 1 to 256, not {processes}")
    if metrics_port is not None and not 0 < metrics_port <= 65_536 - processes:
        problems.append(f"--metrics-port must be from 1 to 65535, not {metrics_port}")
    for name, value in (
        ("answer", answer_seconds), ("drain", drain_seconds), ("write", write_seconds),
    ):  # fmt: skip
        if not 0 <= value <= 86_400:
            problems.append(f"--{name}-seconds must be from 0 to 86400, not {value:g}")
    if problems:
        raise ConfigurationError("; ".join(problems))
    settings = GatewaySettings(
        redis_url=redis_url,
        database_url=database_url,
        key_prefix=key_prefix,
        models=queues,
        host=host,
        port=port,
        is_open=is_open,
        key_secret=key_secret,
        answer_s=answer_seconds,
        drain_s=drain_seconds,
        files=files,
        upload_bytes=upload_mb * 1_000_000,
        batch_lines=batch_lines,
        write_s=write_seconds,
        processes=processes,
        forwarded_allow_ips=forwarded_allow_ips,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    raise typer.Exit(run(settings))


def _named_queues(given: list[str]) -> tuple[dict[str, str], list[str]]:
    queues, problems = {}, []
    for item in given:
        name, sign, queue = item.rpartition("=")
        if not (sign and name and queue):
            problems.append(f"--model must be NAME=QUEUE, not {item!r}")
        queues[name] = queue
    return queues, problems


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
