"""Draws the view of `tokenmill top` from values. It fits any width from 80 columns on, and names
every problem.

It reads no connection and no clock, so that a test can draw any state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import count, seconds, state
from tokenmill.operations.overview import ClassState, QueueState, TenantState
from tokenmill.operations.records import JobInfo
from tokenmill_schemas.control import WorkerStatus

WIDE = 120  # width from which less important columns are shown
MAX_TENANTS = 8
QUIT_KEY = "q quits"
CLASS_STYLES = {"interactive": "bold cyan", "standard": "default", "bulk": "dim"}


@dataclass(frozen=True, slots=True)
class Look:
    """One state of the queue. `submitted_per_s` and `finished_per_s` need two states; until then
    they are None.
    """

    now_ms: int
    clock: str
    queue: QueueState
    jobs: Sequence[JobInfo] = field(default_factory=tuple)
    submitted_per_s: float | None = None
    finished_per_s: float | None = None


def draw(look: Look, width: int, *, is_live: bool = False) -> Group:
    parts: list[RenderableType] = [
        _head(look, width),
        Text(),
        _classes(look, width),
        Text(),
        *workers(look, width),
    ]
    if look.queue.tenants and [tenant.tenant for tenant in look.queue.tenants] != [""]:
        parts += [Text(), tenants(look.queue.tenants, width)]
    if look.jobs:
        parts += [Text(), _jobs(look, width)]
    return Group(*parts, Text(), legend(width, is_live=is_live))


def legend(width: int, *, is_live: bool = False) -> Text:
    """Return the meaning of the short headings in the table of workers, and the key that ends a
    live view.
    """
    words = "+n waits · TTFT to first token · ITL between tokens · HITS cache hits"
    if width >= WIDE:
        words = "BATCH running/most +waiting · TTFT to first token · ITL between tokens "
        words += "(median · 95 %) · HITS cache hits"
    return Text(
        f"{words} · {QUIT_KEY}" if is_live else words,
        style="dim",
        overflow="ellipsis",
        no_wrap=True,
    )


# ── head ──


def _head(look: Look, width: int) -> RenderableType:
    queue = look.queue
    pace = sum(worker.tokens_per_s for worker in queue.workers)
    left = Text.assemble((queue.queue, "bold"), "  ", *alarm(queue))
    right = Text(look.clock, style="dim")
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True)
    line.add_row(left, right)
    facts = [("running", f"{queue.running:,}"), ("waiting", f"{queue.waiting:,}")]
    if look.submitted_per_s is not None and look.finished_per_s is not None:
        facts += [("in/s", _rate(look.submitted_per_s)), ("out/s", _rate(look.finished_per_s))]
    facts += [("scheduled", f"{queue.scheduled:,}")] if queue.scheduled else []
    facts += [("ended", f"{sum(queue.finished.values()):,}")]
    gap = Text("   " if width >= WIDE else "  ")
    jobs = gap.join(Text.assemble((value, "bold"), (f" {name}", "dim")) for name, value in facts)
    numbers = Text.assemble(
        (f"{pace:,.0f}", "bold"), (" tokens/s", "dim"), gap, ("jobs: ", "dim"), jobs
    )
    numbers.no_wrap, numbers.overflow = True, "ellipsis"
    return Group(line, numbers)


def alarm(queue: QueueState) -> list[tuple[str, str] | str]:
    """Return the most important fact about a queue: no live worker, a worker in trouble, or the
    number of workers; then dead jobs.
    """
    marks: list[tuple[str, str] | str] = []
    if not queue.workers:
        words = "and jobs are waiting" if queue.waiting else "nothing is waiting either"
        marks += [(" NO WORKER IS ALIVE ", "bold red reverse"), f" {words}"]
    # a worker that is loading has no model yet
    elif any(worker.problems for worker in queue.workers if worker.model):
        marks += [(" TROUBLE ", "bold black on yellow")]
    else:
        marks += [("●", "green"), f" {count(len(queue.workers), 'worker')}"]
    if queue.dead:
        marks += ["  ", (f" {queue.dead} DEAD ", "bold red reverse")]
    return marks


# ── tables ──


def grid(width: int, *columns: tuple[str, str], gives_way: str = "") -> Table:
    """Return an empty table. Columns are (title, justification).

    If they do not fit, the column `gives_way` is cut before any other; its cells must not wrap.
    """
    table = Table(
        box=None,
        header_style="bold dim",
        pad_edge=False,
        padding=(0, 2 if width >= WIDE else 1, 0, 0),
    )
    for title, justify in columns:
        stays = title != gives_way
        table.add_column(title, justify=justify, no_wrap=stays, overflow="ellipsis")  # type: ignore[arg-type]
    return table


def _classes(look: Look, width: int) -> RenderableType:
    queue = look.queue
    most = max((one.waiting for one in queue.classes.values()), default=0)
    table = grid(
        width,
        ("PRIORITY", "left"),
        ("WAITING", "right"),
        ("TOKENS", "right"),
        ("OLDEST", "right"),
        ("", "left"),
    )
    for name, one in queue.classes.items():
        style = CLASS_STYLES.get(name, "") if one.waiting else "dim"
        oldest = seconds(one.oldest_ms) if one.oldest_ms else "–"
        cells = (
            name,
            f"{one.waiting:,}",
            _short(one.waiting_tokens),
            Text(oldest, style=age_style(name, one)),
        )
        table.add_row(
            *cells,
            _bar(one.waiting, most, min(40, width - 50), "cyan") if most else "",
            style=style,
        )
    return table


def age_style(name: str, one: ClassState) -> str:
    """Return red if the oldest job's age would fire the alert of this class."""
    limit_ms = {"interactive": 15_000, "standard": 600_000, "bulk": 43_200_000}.get(name)
    return "bold red" if limit_ms is not None and one.oldest_ms > limit_ms else ""


def workers(look: Look, width: int) -> list[RenderableType]:
    if not look.queue.workers:
        return [Text("start one with: tokenmill worker", style="dim")]
    is_wide = width >= WIDE
    columns = [
        ("WORKER", "left"),
        ("BATCH", "left"),
        ("CACHE", "left"),
        ("TOK/S", "right"),
        ("TTFT", "right"),
    ]
    columns += [("ITL", "right"), *([("QUEUED", "right"), ("TO SQL", "right")] if is_wide else [])]
    columns += [("HITS", "right"), ("UP", "right")]
    table = grid(width, *columns)
    notes: list[RenderableType] = []
    for worker in look.queue.workers:
        table.add_row(*_worker(worker, look.now_ms, is_wide))
        notes += [
            Text.assemble((f"  {worker.worker_id}: ", "bold"), (words, style), overflow="fold")
            for words, style in _notes(worker)
        ]
    return [*_served(look.queue.workers), table, *notes]


def _served(workers: Sequence[WorkerStatus]) -> Iterator[Text]:
    """Yield a line for each model that the workers serve, with its length and its other names."""
    for name, length, adapters, aliases in dict.fromkeys(
        (one.model, one.max_model_len, one.adapters, tuple(sorted(one.aliases)))
        for one in workers
        if one.model
    ):
        facts = [name, *([f"{length:,} tokens"] if length else [])]
        facts += [f"adapters {', '.join(adapters)}"] if adapters else []
        facts += [f"also {', '.join(aliases)}"] if aliases else []
        yield Text(" · ".join(facts), style="dim", overflow="ellipsis", no_wrap=True)


def _worker(worker: WorkerStatus, now_ms: int, is_wide: bool) -> list[RenderableType]:
    """Return the row of a worker. Latencies are the median and, if there is room, the 95th
    percentile.
    """
    used = worker.total_blocks - worker.free_blocks
    share = used / worker.total_blocks if worker.total_blocks else 0.0
    size = 10 if is_wide else 5
    batch = _bar(worker.running, worker.max_running, size, "green")
    batch.append(
        f" {worker.running}/{worker.max_running}"
        + (f" +{worker.waiting}" if worker.waiting else "")
    )
    color = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    cache = _bar(used, worker.total_blocks, size, color).append(f" {share:4.0%}")
    name = Text(
        _tail(worker.worker_id, 24 if is_wide else 18), style="yellow" if _notes(worker) else ""
    )
    first, token, queued = (
        _pair(p, is_wide) for p in (worker.first_token_ms, worker.token_ms, worker.queue_ms)
    )
    rare = [queued, f"{worker.to_record:,}" if worker.to_record else "–"] if is_wide else []
    hits = "–" if worker.prefix_hits is None else f"{worker.prefix_hits:.0%}"
    up = seconds(now_ms - worker.started_ms) if worker.started_ms else "–"
    return [name, batch, cache, f"{worker.tokens_per_s:,.0f}", first, token, *rare, hits, up]


def _notes(worker: WorkerStatus) -> list[tuple[str, str]]:
    """Return the remarks on a worker beside its numbers: its state first, then its problems."""
    notes = []
    if worker.draining:
        notes.append(("draining, claims nothing more", "yellow"))
    if not worker.model:
        notes.append(("loading its model", "cyan"))
    notes += [(problem, "red") for problem in worker.problems if worker.model]
    if worker.engine_restarts:
        notes.append(
            (f"{count(worker.engine_restarts, 'engine restart')} since it started", "yellow")
        )
    return notes


def tenants(states: Sequence[TenantState], width: int) -> RenderableType:
    table = grid(
        width,
        ("TENANT", "left"),
        ("RUNNING", "right"),
        ("WAITING", "right"),
        ("TOK/S", "right"),
        ("", "left"),
    )
    most = max(tenant.tokens_per_s for tenant in states)
    for tenant in states[:MAX_TENANTS]:
        name = Text(tenant.tenant or "(none)", style="" if tenant.tenant else "dim")
        name.truncate(32, overflow="ellipsis")
        bar = _bar(tenant.tokens_per_s, most, min(40, width - 60), "green") if most else Text()
        table.add_row(
            name, f"{tenant.running:,}", f"{tenant.waiting:,}", f"{tenant.tokens_per_s:,.0f}", bar
        )
    rest = len(states) - MAX_TENANTS
    if rest > 0:
        table.add_row(Text(f"and {rest} more", style="dim"))
    return table


def _jobs(look: Look, width: int) -> RenderableType:
    columns = [
        ("JOB", "left"),
        ("STATUS", "left"),
        ("PRIORITY", "left"),
        ("TOKENS", "right"),
        ("AGE", "right"),
    ]
    columns += [("TENANT", "left"), ("WORKER", "left")] if width >= WIDE else [("TENANT", "left")]
    table = grid(width, *columns, gives_way="TENANT")
    for job in look.jobs:
        age = seconds(look.now_ms - job.created_ms) if job.created_ms else "–"
        cells: list[RenderableType] = [
            job.job_id,
            state(job.status.value),
            job.priority,
            f"{job.tokens or ''}",
            age,
        ]
        tenant = Text(job.tenant, no_wrap=True, overflow="ellipsis")
        table.add_row(*cells, tenant, *([job.worker_id] if width >= WIDE else []))
    return table


# ── small things ──


def _bar(value: float, most: float, size: int, style: str) -> Text:
    """Draw a bar. A value above 0 has at least one mark."""
    full = min(size, max(1, round(size * value / most))) if value > 0 and most > 0 else 0
    return Text.assemble(("━" * full, style), ("─" * (size - full), "bright_black"))


def _tail(name: str, size: int) -> str:
    """Return the end of a worker's name, since names of workers differ at their ends."""
    return name if len(name) <= size else f"…{name[1 - size :]}"


def _pair(pair: tuple[float, float] | None, is_wide: bool) -> str:
    if pair is None:
        return "–"
    return f"{_duration(pair[0])} · {_duration(pair[1])}" if is_wide else _duration(pair[0])


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else seconds(milliseconds)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _short(value: float) -> str:
    """Return a number such as `950`, `12.3 k` or `4.1 M`."""
    for limit, unit in ((1e3, ""), (1e6, " k"), (1e9, " M")):
        if value < limit:
            return (
                f"{value / limit * 1e3:.0f}{unit}"
                if not unit or value >= limit / 10
                else f"{value / limit * 1e3:.1f}{unit}"
            )
    return f"{value / 1e9:.1f} G"
