"""The view of several queues in `tokenmill top`: one line for each, then the workers and tenants of
each. A single queue is shown in full.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from tokenmill.cli.output import seconds
from tokenmill.cli.views.top import (
    CLASS_STYLES,
    QUIT_KEY,
    WIDE,
    Look,
    age_style,
    alarm,
    draw,
    grid,
    legend,
    tenants,
    workers,
)


def draw_all(looks: Sequence[Look], width: int, *, is_live: bool = False) -> RenderableType:
    if len(looks) == 1:
        return draw(looks[0], width, is_live=is_live)
    parts: list[RenderableType] = [_overview(looks, width)]
    for look in looks:
        parts += [
            Text(),
            Rule(Text.assemble((look.queue.queue, "bold"), "  ", *alarm(look.queue)), align="left"),
        ]
        parts += workers(look, width)
        if [tenant.tenant for tenant in look.queue.tenants] not in ([], [""]):
            parts += [Text(), tenants(look.queue.tenants, width)]
    return Group(*parts, Text(), legend(width, is_live=is_live))


def trouble(message: str, since: str, last: Sequence[Look], width: int) -> Group:
    """Draw the state in which the server does not answer: the error, and the last state that was
    read, marked as old.
    """
    head = Text.assemble((" NO CONNECTION ", "bold red reverse"), f"  since {since}, trying again")
    words = Text(message, style="red", overflow="fold")
    if not last:
        return Group(head, words, Text(), Text(QUIT_KEY, style="dim"))
    old = Text(f"as it was at {last[0].clock}:", style="dim")
    return Group(head, words, Text(), old, Text(), draw_all(last, width, is_live=True))


def _overview(looks: Sequence[Look], width: int) -> RenderableType:
    names = list(CLASS_STYLES)
    classes = names if width >= WIDE else [name[:5] for name in names]
    numbers = [
        (name.upper(), "right")
        for name in ("workers", "running", *classes, "oldest", "tok/s", "dead")
    ]
    table = grid(width, ("QUEUE", "left"), *numbers)
    for look in looks:
        queue = look.queue
        oldest = max(queue.classes.items(), key=lambda item: item[1].oldest_ms, default=None)
        age = Text("–")
        if oldest is not None and oldest[1].oldest_ms:
            age = Text(seconds(oldest[1].oldest_ms), style=age_style(*oldest))
        waiting = [queue.classes[name].waiting if name in queue.classes else 0 for name in names]
        pace = sum(worker.tokens_per_s for worker in queue.workers)
        alive = Text(f"{len(queue.workers)}", style="" if queue.workers else "bold red")
        dead = Text(f"{queue.dead:,}", style="bold red" if queue.dead else "dim")
        title = Text(queue.queue)
        title.truncate(width - 64, overflow="ellipsis")  # cut names, never numbers
        table.add_row(
            title,
            alive,
            f"{queue.running:,}",
            *(f"{n:,}" for n in waiting),
            age,
            f"{pace:,.0f}",
            dead,
        )
    return table
