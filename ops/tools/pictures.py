"""Makes the pictures of README and guides: two from real runs, one from README's table of speed.

    ops/pictures                    # all three
    ops/pictures speed              # only the bar chart; needs no worker
    ops/pictures --check            # fails if the bar chart does not show README's table

`streams` is the demonstration in a terminal, exported by rich. `console` is the gateway's page in
Chromium, while it streams. Both start a private server and a worker with SmolLM2-135M, and stop
them.
"""

import argparse
import asyncio
import io
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console

from ops.demonstration.questions import QUESTIONS
from ops.demonstration.stack import DemoStack
from ops.demonstration.view import Panels
from tokenmill import AsyncClient
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import free_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ops" / "guides" / "pictures"
MODEL = "smollm2-135m-instruct"
QUEUE = "pictures"
COLUMNS, ROWS = 120, 32
SHOWN_AFTER_TOKENS = 240  # of all six answers together
START_S, PAGE_MS = 60.0, 60_000
PAGE_SIZE = {"width": 1120, "height": 640}
PROMPT = "Explain in a few sentences why the sky is blue, and why sunsets are red."


# ---- the demonstration in a terminal ----


async def streams(stack: DemoStack) -> None:
    """Save the panels at a moment when every answer has begun and none has ended."""
    console = Console(
        record=True, width=COLUMNS, height=ROWS, file=io.StringIO(), force_terminal=True
    )
    panels = Panels(QUESTIONS, console)
    async with AsyncClient(stack.redis_url, queue=stack.queue) as client:
        jobs = [
            await client.submit(
                messages=[{"role": "user", "content": question.text}],
                max_tokens=question.max_tokens,
                temperature=question.temperature,
                seed=question.seed,
                tenant=question.tenant,
                priority=question.priority,
            )
            for question in QUESTIONS
        ]
        counts = [0] * len(jobs)
        enough = asyncio.Event()

        async def follow(index: int) -> None:
            async for chunk in client.stream(jobs[index]):
                if enough.is_set():
                    return
                panels.token(index, chunk.text, len(chunk.token_ids))
                counts[index] += len(chunk.token_ids)
                if sum(counts) >= SHOWN_AFTER_TOKENS and all(counts):
                    enough.set()

        tasks = [asyncio.create_task(follow(index)) for index in range(len(jobs))]
        await asyncio.wait_for(enough.wait(), START_S)
        console.print(panels)
        await asyncio.gather(*tasks)
    picture = console.export_svg(title="ops/demo", unique_id="streams")
    (FOLDER / "streams.svg").write_text(picture, encoding="utf-8")


# ---- the console in a browser ----


async def console_page(stack: DemoStack) -> None:
    """Save the gateway's console in the middle of its second answer."""
    from tests.support.browser import chromium_folder, open_browser

    with gateway(stack) as url:
        async with open_browser(chromium_folder()) as browser:
            shown = await browser.new_page(viewport=PAGE_SIZE, device_scale_factor=1.5)  # type: ignore[arg-type]
            shown.set_default_timeout(PAGE_MS)
            await shown.goto(url)
            await shown.wait_for_function("!document.getElementById('send').disabled")
            for prompt, count, state in (
                ("What is a message queue?", 60, "incomplete"),
                (PROMPT, 1000, "in_progress"),
            ):
                await shown.get_by_label("Max tokens").fill(str(count))
                await shown.get_by_label("Prompt").fill(prompt)
                await shown.get_by_role("button", name="Send").click()
                await shown.wait_for_function(
                    "state => [...document.querySelectorAll('#turns .status')].at(-1)"
                    ".dataset.status"
                    " === state && [...document.querySelectorAll('.answer')].at(-1)"
                    ".textContent.length > 200",
                    arg=state,
                )
            await shown.screenshot(path=FOLDER / "console.png")


@contextmanager
def gateway(stack: DemoStack) -> Iterator[str]:
    port = free_port()
    settings = {
        "TOKENMILL_REDIS_URL": stack.redis_url,
        "TOKENMILL_DATABASE_URL": stack.database_url,
        "TOKENMILL_GATEWAY_MODEL": f"{MODEL}={stack.queue}",
        "TOKENMILL_GATEWAY_PORT": str(port),
    }
    command = [sys.executable, "-m", "tokenmill.cli", "gateway", "--open"]
    with (stack.directory / "gateway.log").open("ab") as log:
        child = GuardedProcess(
            command, at_death=signal.SIGKILL, cwd=ROOT, env=os.environ | settings, output=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url)
        yield url
    finally:
        child.end(signal.SIGTERM, START_S)


def _wait_for(url: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit("ops/pictures: the gateway did not start")


# ---- the bar chart of README's table ----


@dataclass(frozen=True, slots=True)
class Row:
    """One workload of README's table: its name, and tokens per second of each system."""

    workload: str
    rates: tuple[float, ...]


SYSTEMS = ("tokenmill", "vLLM 0.32", "Transformers 5.23")
COLOURS = ("#1f6feb", "#8b949e", "#c9b07a")
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 760, 80, 70, 13, 14, 56


def speed_rows(readme: str) -> list[Row]:
    """Return the rows of README's table "tokens per second"."""
    table = readme.split("| tokens per second |")[1].split("\n\n")[0]
    rows = []
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rates = tuple(
            float(cell.split(" ")[0].replace(",", "")) for cell in cells[1 : 1 + len(SYSTEMS)]
        )
        rows.append(Row(cells[0].partition(":")[0], rates))
    return rows


def chart(rows: Sequence[Row]) -> str:
    """Return a bar chart as SVG. All bars have the same scale."""
    group = len(SYSTEMS) * BAR + GAP
    height = TOP + group * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Tokens per second on two CPU cores, by workload and system</title>",
        "<style>text{font:12px system-ui,sans-serif;fill:#24292f}.h{font-weight:600}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}</style>",
        f'<text x="{LEFT}" y="16" class="h">Tokens per second, SmolLM2-135M, two CPU cores</text>',
    ]
    for place, (system, colour) in enumerate(zip(SYSTEMS, COLOURS, strict=True)):
        left = LEFT + 150 * place
        parts.append(f'<rect x="{left}" y="27" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{left + 16}" y="37">{escape(system)}</text>')
    longest = max(rate for row in rows for rate in row.rates)
    for number, row in enumerate(rows):
        top = TOP + group * number
        middle = top + len(SYSTEMS) * BAR // 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{row.workload}</text>')
        for place, rate in enumerate(row.rates):
            length = max(1.0, (WIDTH - LEFT - RIGHT) * rate / longest)
            y = top + place * BAR
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}"'
                f' fill="{COLOURS[place]}"/>'
            )
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 10}">{rate:,.0f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def speed() -> str:
    return chart(speed_rows((ROOT / "README.md").read_text(encoding="utf-8")))


# ---- the command ----


def main() -> int:
    parser = argparse.ArgumentParser(prog="ops/pictures", description=__doc__.splitlines()[0])
    names = ("streams", "console", "speed")
    parser.add_argument("what", nargs="*", help=f"{', '.join(names)}; none: all")
    parser.add_argument("--check", action="store_true", help="only compare the bar chart")
    options = parser.parse_args()
    if unknown := set(options.what) - set(names):
        parser.error(f"there is no picture {', '.join(sorted(unknown))}")
    target = FOLDER / "speed.svg"
    if options.check:
        is_fresh = target.exists() and target.read_text(encoding="utf-8") == speed()
        print(
            "speed.svg is up to date" if is_fresh else "speed.svg is stale: run ops/pictures speed"
        )
        return 0 if is_fresh else 1
    wanted = options.what or names
    FOLDER.mkdir(exist_ok=True)
    if "speed" in wanted:
        target.write_text(speed(), encoding="utf-8")
    if live := [name for name in wanted if name != "speed"]:
        with DemoStack(MODEL, QUEUE) as stack:
            stack.start(lambda text: print(text, flush=True))
            for name in live:
                asyncio.run({"streams": streams, "console": console_page}[name](stack))
    for name in wanted:
        print(f"made {next(FOLDER.glob(name + '.*')).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
