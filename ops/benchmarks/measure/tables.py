"""The one table of all commands: cases and their figures, without a frame, in 80 columns."""

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

Figures = Mapping[str, object]  # numbers, and words of a case, by figure
Columns = Mapping[str, tuple[str, str]]  # heading and format of each figure, in order


def show(console: Console, title: str, cases: Mapping[str, Figures], columns: Columns) -> None:
    """Print a table with a row for each case; figures that no case has are left out."""
    found = {name for figures in cases.values() for name in figures}
    shown = {name: column for name, column in columns.items() if name in found}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for heading, _ in shown.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for case, figures in cases.items():
        table.add_row(case, *(_cell(figures.get(n), spec) for n, (_, spec) in shown.items()))
    console.print(f"\n{title}", highlight=False, soft_wrap=True)
    console.print(table)


def number(value: float) -> str:
    """Format a number with three or more digits; thousands of thousands are shortened."""
    if value >= 100_000:
        return f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _cell(value: object, spec: str) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, str):
        return value
    assert isinstance(value, int | float), "a figure is a number or words"
    return spec.format(value) if spec else number(value)
