"""`score`: print how likely a model finds given continuations of a prompt."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli.connection import ConnectionOptions, Json, connected
from tokenmill.cli.inputs import prompt_of
from tokenmill.cli.output import emit, say


def register(app: typer.Typer) -> None:
    app.command()(connected(score))


def score(
    connection: ConnectionOptions,
    prompt: Annotated[str, typer.Argument(help="Text before the continuations; '-': stdin.")],
    continuations: Annotated[
        list[str], typer.Argument(help="Texts to score; most begin with a space.")
    ],
    *,
    chat: Annotated[
        bool, typer.Option("--chat", "-c", help="Send the prompt as a user message.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message before the prompt; implies --chat.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Longest wait in seconds.", min=0)] = None,
    json: Json = False,
) -> None:
    """Print the log-probability of each continuation, the number of its tokens, and its text.

    tokenmill score "The capital of France is" " Paris" " London"

    Nothing is generated. With --json, print the whole result, token by token.
    """
    given = prompt_of(prompt, chat or system is not None, system, None, None)
    with connection.client() as client:
        result = client.score(continuations=continuations, timeout=timeout, **given)
    if json:
        emit(result)
        return
    for choice in result.choices:
        count = len(choice.token_ids)
        say(f"{choice.total_logprob:10.4f}  {count:4d}  {choice.text!r}\n")
