"""Tables: one line for each row on a terminal, whole elsewhere."""

import io
import json

import pytest
from rich.console import Console

from tokenmill.cli import output
from tokenmill_schemas.generation import TokenLogprob

JOB = "0198f3c2-7a11-7c03-9b1e-2f6f0a5d8e00"
TENANT, NOTE = "acme-corporation-europe-west", "the prompt has 9000 tokens; the model takes 8192"
COLUMNS: list[str | tuple[str, str]] = ["JOB", "STATUS", ("TOKENS", "right"), "TENANT", ""]
ROWS = [(JOB, output.state("failed"), 128, TENANT, NOTE), ("other", "queued", "", "a", "b")]


def printed(monkeypatch: pytest.MonkeyPatch, width: int, *, is_terminal: bool) -> list[str]:
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=is_terminal, color_system=None, soft_wrap=True
    )
    monkeypatch.setattr(output, "out", lambda: console)
    output.table(COLUMNS, ROWS)
    return file.getvalue().splitlines()


def test_json_of_a_log_probability_has_text_for_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    entry = TokenLogprob(-0.5, ((7, -0.5), (8, -1.5)), b"\xe2\x98", ("☁".encode(), b" a\xe2"))
    output.emit({"logprobs": (entry,)}, line=True)
    [read] = json.loads(capsys.readouterr().out)["logprobs"]
    assert read == [-0.5, [[7, -0.5], [8, -1.5]], "\\xe2\\x98", ["☁", " a\\xe2"]]


@pytest.mark.parametrize(("is_terminal", "num_lines"), [(True, 2), (False, 1)])
def test_an_error_is_wrapped_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, num_lines: int
) -> None:
    file = io.StringIO()
    console = Console(
        file=file, width=40, force_terminal=is_terminal, color_system=None, soft_wrap=True
    )
    monkeypatch.setattr(output, "err", lambda: console)
    output.complain("`tokenmill dev` starts a server and a worker")
    lines = file.getvalue().splitlines()
    assert len(lines) == num_lines
    assert " ".join(map(str.strip, lines)) == "Error: `tokenmill dev` starts a server and a worker"


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_terminal_has_one_line_for_each_row_and_ids_whole(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    lines = printed(monkeypatch, width, is_terminal=True)
    assert len(lines) == 1 + len(ROWS)
    assert max(map(len, lines)) <= width
    assert lines[1].startswith(JOB)


def test_texts_are_cut_and_then_columns_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _, row, _ = printed(monkeypatch, 90, is_terminal=True)
    assert row.startswith(f"{JOB}  failed     128  acme-")
    assert row.count("…") == 2
    head, row, _ = printed(monkeypatch, 60, is_terminal=True)
    assert head.split() == ["JOB", "STATUS", "TOKENS", "…"]
    assert row.split() == [JOB, "failed", "128"]


@pytest.mark.parametrize(("width", "is_terminal"), [(80, False), (200, True)])
def test_a_row_is_not_cut_in_a_file_or_on_a_wide_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, is_terminal: bool
) -> None:
    _, row, other = printed(monkeypatch, width, is_terminal=is_terminal)
    assert " ".join(row.split()) == f"{JOB} failed 128 {TENANT} {NOTE}"
    assert other.endswith("b")
