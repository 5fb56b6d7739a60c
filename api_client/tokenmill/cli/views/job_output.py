"""Follows one job in the terminal. The exit status shows whether there is an answer."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import typer
from msgspec import to_builtins
from rich.text import Text

from tokenmill.cli.output import complain, emit, err, out, say, say_dimmed, seconds
from tokenmill.client import Client
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.result import JobError, JobResult, JobStatus, ToolCallDelta, Usage


def follow(
    client: Client,
    job_id: str,
    *,
    starting_after: str = "0",
    quiet: bool = False,
    as_json: bool = False,
    timeout: float | None = None,
) -> None:
    """Print a job's text as it arrives, or with `quiet` the whole answer at the end. Exits with 1
    if the job failed.
    """
    try:
        if quiet:
            _wait(client, job_id, as_json, timeout)
        else:
            _stream(client, job_id, starting_after, as_json, timeout)
    except KeyboardInterrupt:
        if not quiet and not as_json:
            err().print()  # end the answer's last line
        complain(
            f"interrupted; the job goes on: tokenmill tail {job_id}, or tokenmill cancel {job_id}",
            "note",
        )
        raise typer.Exit(130) from None


def _stream(
    client: Client, job_id: str, starting_after: str, as_json: bool, timeout: float | None
) -> None:
    shown = _Pieces()
    for chunk in client.stream(job_id, starting_after=starting_after, timeout=timeout):
        if as_json:
            plain = to_builtins(chunk, builtin_types=(bytes,))
            emit(plain | {"position": chunk.position}, line=True)
        else:
            shown.add(chunk)
        if chunk.status is not None:
            if not as_json:
                say("\n")
            _conclude(job_id, chunk.status, chunk.usage, chunk.error, is_silent=as_json)


class _Pieces:
    """Prints the pieces of a growing answer. Thoughts are dimmed, and only a terminal has them."""

    def __init__(self) -> None:
        self._has_thoughts = out().is_terminal
        self._choice: int | None = None  # the one that was printed last
        self._is_thought = False

    def add(self, chunk: Chunk) -> None:
        thought = chunk.reasoning if self._has_thoughts else ""
        text = chunk.text + _calls(chunk.tool_calls)
        if not thought and not text:
            return
        if chunk.choice != self._choice and (
            chunk.choice or self._choice is not None or chunk.n > 1
        ):
            say(("" if self._choice is None else "\n") + f"[{chunk.choice}] ")
            self._is_thought = False
        self._choice = chunk.choice
        if thought:
            say_dimmed(thought)
            self._is_thought = True
        if text:
            say("\n\n" * self._is_thought + text)
            self._is_thought = False


def _wait(client: Client, job_id: str, as_json: bool, timeout: float | None) -> None:
    result = client.result(job_id, timeout)
    if as_json:
        emit(result)
    else:
        show_answer(result)
    _conclude(job_id, result.status, result.usage, result.error, is_silent=as_json)


def show_answer(result: JobResult) -> None:
    """Print the text and the tool calls of each choice, numbered if there are several; before them
    on a terminal the thoughts.
    """
    for choice in result.choices:
        if len(result.choices) > 1:
            say(f"[{choice.index}] ")
        if choice.reasoning and out().is_terminal:
            say_dimmed(choice.reasoning)
            say("\n\n")
        say(choice.text + _calls(choice.call_deltas) + "\n")


def _calls(deltas: Iterable[ToolCallDelta]) -> str:
    """Return pieces of tool calls as they are shown: each call in a line of its own."""
    return "".join((f"\n{delta.name} " if delta.name else "") + delta.arguments for delta in deltas)


def _conclude(
    job_id: str, status: JobStatus, usage: Usage | None, error: JobError | None, *, is_silent: bool
) -> None:
    if not is_silent:
        if error is not None or status is not JobStatus.SUCCEEDED:
            complain(f"job {job_id} {status.value}" + (f": {error.message}" if error else ""))
        elif sys.stderr.isatty():
            err().print(Text(f"{job_id} · {_summary(usage or Usage())}", style="dim"))
    if status is not JobStatus.SUCCEEDED:
        raise typer.Exit(1)


def _summary(usage: Usage) -> str:
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    tokens = f"{usage.prompt_tokens} prompt tokens{cached}, {usage.completion_tokens} generated"
    return f"{tokens} · first after {seconds(usage.ttft_ms)}, all in {seconds(usage.total_ms)}"
