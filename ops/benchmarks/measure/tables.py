"""Tables of all commands: no frame, one space between columns, so that ten columns fit in 80."""

from rich import box
from rich.table import Table


def plain_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
