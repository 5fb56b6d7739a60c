"""`submit` and `tail`: submit a job, and print its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

import typer

from tokenmill.cli.connection import ConnectionOptions, Job, Json, connected, metadata_of, was_typed
from tokenmill.cli.inputs import from_json, prompt_of, text_of
from tokenmill.cli.output import complain, emit, say
from tokenmill.cli.sampling_options import with_sampling
from tokenmill.cli.views.job_output import follow
from tokenmill.client import Client
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill_schemas.job import Priority


def register(app: typer.Typer) -> None:
    app.command()(connected(with_sampling(submit)))
    app.command()(connected(tail))


def _panel(title: str) -> Callable[..., Any]:
    """Return a function that makes an option of its help text and, where given, its flags."""
    return lambda words, *flags: typer.Option(*flags, help=words, rich_help_panel=title)


_prompt, _sampling, _job = _panel("Prompt"), _panel("Sampling"), _panel("Job")


def submit(
    connection: ConnectionOptions,
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; read from stdin if missing or '-'.")
    ] = None,
    *,
    chat: Annotated[bool, _prompt("Send the prompt as a user message.", "--chat", "-c")] = False,
    system: Annotated[
        str | None, _prompt("System message before the prompt; implies --chat.")
    ] = None,
    messages: Annotated[str | None, _prompt("Messages as JSON (or @FILE).")] = None,
    prompt_ids: Annotated[str | None, _prompt("Token ids, separated by commas.")] = None,
    chat_template_kwargs: Annotated[
        str | None, _prompt("Variables of the chat template as JSON (or @FILE).")
    ] = None,
    documents: Annotated[
        str | None, _prompt("Documents for the chat template as JSON (or @FILE).")
    ] = None,
    tools: Annotated[str | None, _prompt("OpenAI's tools as JSON (or @FILE).")] = None,
    tool_choice: Annotated[str | None, _prompt("auto, none, required, or function:NAME.")] = None,
    parallel_tool_calls: Annotated[
        bool | None, _prompt("Let an answer call several tools.")
    ] = None,
    continue_final_message: Annotated[
        bool,
        _prompt(
            "Continue the final message instead of beginning another.", "--continue-final-message"
        ),
    ] = False,
    generation_prompt: Annotated[
        bool | None, _prompt("Begin an assistant's message after the chat.")
    ] = None,
    sampling: dict[str, Any],
    json_schema: Annotated[
        str | None, _sampling("JSON schema that the answer keeps (or @FILE).")
    ] = None,
    regex: Annotated[str | None, _sampling("Regular expression that the answer matches.")] = None,
    grammar: Annotated[
        str | None, _sampling("EBNF grammar that the answer follows (or @FILE).")
    ] = None,
    response_format: Annotated[
        str | None, _sampling("OpenAI's response_format as JSON (or @FILE).")
    ] = None,
    priority: Annotated[Priority, _job("Priority class.")] = Priority.STANDARD,
    tenant: Annotated[str | None, _job("Tenant of the job.")] = None,
    session: Annotated[
        str | None, _job("Jobs of one session prefer the worker that had the last of them.")
    ] = None,
    idempotency_key: Annotated[
        str | None, _job("Submitting twice with the same key gives one job.")
    ] = None,
    deadline: Annotated[float | None, _job("Seconds from now until the job expires.")] = None,
    delay: Annotated[float | None, _job("Seconds from now until the job may start.")] = None,
    metadata: Annotated[
        list[str] | None, _job("KEY=VALUE, kept with the result; may be repeated.")
    ] = None,
    webhook: Annotated[str | None, _job("URL that is called when the job ends.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream", "-s", help="Print the tokens as they are generated.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Wait until the job ends, then print the answer.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(help="Longest silence (--stream) or wait (--wait) in seconds.", min=0),
    ] = None,
    json: Json = False,
) -> None:
    """Queue a job; print its id, or with --stream or --wait its answer.

    tokenmill submit "Once upon a time" -n 40 --stream
    echo "Why is the sky blue?" | tokenmill submit --chat --wait

    Without --queue, --model names the queue. With --queue, it names a model, alias or adapter.
    """
    arguments: dict[str, Any] = {
        **sampling,
        **prompt_of(prompt, chat or system is not None, system, messages, prompt_ids),
        "continue_final_message": continue_final_message or None,
        "add_generation_prompt": generation_prompt,
        "tool_choice": tool_choice,
        "parallel_tool_calls": parallel_tool_calls,
        "priority": priority,
        "tenant": tenant,
        "session": session,
        "idempotency_key": idempotency_key,
        "deadline": deadline,
        "webhook": webhook,
    }
    texts = {"chat_template_kwargs": chat_template_kwargs, "documents": documents, "tools": tools}
    for name, text in texts.items():
        if text is not None:
            arguments[name] = from_json(text, f"--{name.replace('_', '-')}")
    if wanted := _response_format(json_schema, regex, grammar, response_format):
        arguments["response_format"] = wanted
    if metadata:
        arguments["metadata"] = metadata_of(metadata)
    if delay is not None:
        arguments["not_before"] = _in_seconds(delay)
    if connection.queue and was_typed(context, "model"):
        arguments["model"] = connection.model
    with connection.client() as client:
        job = client.submit(**arguments)
        if not job.is_unserved:  # else the client has warned already
            _note_idle_queue(client)
        if stream or wait:
            follow(client, str(job), quiet=wait and not stream, as_json=json, timeout=timeout)
        elif json:
            emit({"job_id": str(job), "queue": client.queue})
        else:
            say(f"{job}\n")


def _note_idle_queue(client: Client) -> None:
    """Print a note if no live worker serves the queue. The job is stored already, so errors are
    ignored.
    """
    with contextlib.suppress(TokenmillError):
        if not client.workers():
            complain(
                f"no worker serves the queue {client.queue!r} now; the job waits for one", "note"
            )


def tail(
    connection: ConnectionOptions,
    job: Job,
    *,
    starting_after: Annotated[
        str, typer.Option(help="Position of the last chunk that you have.")
    ] = "0",
    timeout: Annotated[
        float | None, typer.Option(help="Longest silence in seconds.", min=0)
    ] = None,
    json: Json = False,
) -> None:
    """Follow a job's tokens from its first, whenever it began, to its end."""
    with connection.client() as client:
        follow(client, job, starting_after=starting_after, as_json=json, timeout=timeout)


def _response_format(
    json_schema: str | None, regex: str | None, grammar: str | None, whole: str | None
) -> Any:
    """Return the response format in the form that the client reads. `whole` is OpenAI's object."""
    parts: dict[str, Any] = {}
    if json_schema is not None:
        parts["json_schema"] = from_json(json_schema, "--json-schema")
    if regex is not None:
        parts["regex"] = regex
    if grammar is not None:
        parts["grammar"] = text_of(grammar, "--grammar")
    if whole is None:
        return parts
    if parts:
        raise InvalidRequest(
            ["give --response-format, or one of --json-schema, --regex and --grammar"]
        )
    return from_json(whole, "--response-format")


def _in_seconds(delay: float) -> timedelta:
    try:
        return timedelta(seconds=delay)
    except (ValueError, OverflowError):
        raise InvalidRequest([f"--delay is no time: {delay!r}"]) from None
