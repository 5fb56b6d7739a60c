"""An input file is checked line by line, in memory that does not grow."""

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.client.bulk.support import chat, write, write_many
from tokenmill.bulk.formats.input_file import (
    MAX_LINE_BYTES,
    BadLine,
    GoodLine,
    LineSet,
    check_readable,
    parse,
    read,
    read_again,
    summarise,
)
from tokenmill.errors import ConfigurationError


@pytest.mark.parametrize(
    ("line", "code", "name"),
    [
        ("not json", "invalid_json_line", None),
        ("[1]", "invalid_json_line", None),
        ('{"custom_id": "a', "invalid_json_line", None),
        ('{"custom_id": "\\ud800"}', "invalid_json_line", None),
        ("[" * 100_000, "invalid_json_line", None),
        (json.dumps(chat("a") | {"custom_id": None}), "missing_required_parameter", None),
        (json.dumps(chat("")), "missing_required_parameter", None),
        (json.dumps(chat("a") | {"custom_id": 7}), "invalid_custom_id", None),
        (json.dumps(chat("x" * 513)), "invalid_custom_id", "x" * 64),
        (json.dumps(chat("a\0")), "invalid_custom_id", "a\0"),
        ('{"custom_id": "a"}', "missing_required_parameter", "a"),
        (json.dumps(chat("a") | {"url": None}), "missing_required_parameter", "a"),
        (json.dumps(chat("a") | {"method": "GET"}), "invalid_method", "a"),
        (json.dumps(chat("a") | {"url": "/v1/embeddings"}), "invalid_url", "a"),
        (json.dumps(chat("a") | {"url": ["x"]}), "invalid_url", "a"),
        (json.dumps(chat("a") | {"body": "x"}), "missing_required_parameter", "a"),
    ],
)
def test_an_invalid_line_has_an_error_code_and_a_parameter(
    line: str, code: str, name: str | None
) -> None:
    bad = parse(5, line.encode())
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.code, bad.custom_id, bad.status) == (5, code, name, 0)


def test_blank_lines_a_byte_order_mark_and_a_missing_last_newline_are_accepted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + json.dumps(chat("a")).encode()
        + b"\r\n\n  \n"
        + json.dumps(chat("b")).encode()
    )
    lines = list(read(path))
    assert [(line.line, line.custom_id) for line in lines] == [(1, "a"), (4, "b")]
    assert all(isinstance(line, GoodLine) for line in lines)


def test_a_too_long_line_is_skipped_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for _ in range(3 * MAX_LINE_BYTES // 1_000_000):
            file.write(b"x" * 1_000_000)
        file.write(b"\n" + json.dumps(chat("b")).encode() + b"\n")
    first, second = read(path)
    assert isinstance(first, BadLine)
    assert first.code == "line_too_long"
    assert (second.line, second.custom_id) == (2, "b")


def test_a_repeated_custom_id_is_an_invalid_line(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [chat("a"), chat("b"), chat("a"), "x", chat("b"), chat("c")]
    found = summarise(write(tmp_path / "in.jsonl", lines))
    assert (found.total, found.last_line, len(found.first_bad)) == (6, 6, 3)
    assert [line in found.repeated for line in range(1, 7)] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert [bad.code for bad in found.first_bad] == [
        "duplicate_custom_id",
        "invalid_json_line",
        "duplicate_custom_id",
    ]
    assert (found.endpoint, found.model) == ("/v1/chat/completions", "synthetic")


def test_the_digest_depends_on_the_content_alone(tmp_path: Path) -> None:
    first, same = (summarise(write_many(tmp_path / name, 5)).digest for name in ("a", "b"))
    assert first == same != summarise(write_many(tmp_path / "c", 6)).digest


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigurationError, match="cannot read"):
            summarise(path)


LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(LINE.encode(), mtime=0), "packed \\(gzip\\)"),
        (bz2.compress(LINE.encode()), "packed \\(bzip2\\)"),
        (lzma.compress(LINE.encode()), "packed \\(xz\\)"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "packed \\(zstd\\)"),
        (b"PK\x03\x04\x14\x00", "packed \\(zip\\)"),
        (LINE.encode("utf-16"), "UTF-16"),
        (LINE.encode("utf-16-le"), "UTF-16"),
        (LINE.encode("utf-16-be"), "UTF-16"),
        (LINE.encode("utf-32"), "UTF-16 or UTF-32"),
        (LINE.encode("utf-32-be"), "UTF-16 or UTF-32"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(
    tmp_path: Path, content: bytes, kind: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    for call in (check_readable, summarise):
        with pytest.raises(ConfigurationError, match=f"cannot read .+ {kind}"):
            call(path)


def test_a_utf_8_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINE.encode("utf-8-sig"))
    assert (summarise(path).total, summarise(path).first_bad) == (1, [])


def test_an_input_name_that_the_system_refuses_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    for name in ("n" * 256, "a/b\0c"):
        with pytest.raises(ConfigurationError, match="cannot read"):
            check_readable(tmp_path / name)


def test_a_pipe_or_device_is_refused_since_it_is_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigurationError, match="read twice"):
            summarise(path)


def test_a_file_that_changes_between_two_readings_is_refused(tmp_path: Path) -> None:
    path = write_many(tmp_path / "in.jsonl", 5)
    digest = summarise(path).digest
    assert len(list(read_again(path, digest))) == 5
    for count in (4, 6):
        with pytest.raises(ConfigurationError, match="has changed"):
            list(read_again(write_many(path, count), digest))


def test_a_line_set_contains_the_added_lines_and_counts_each_once() -> None:
    lines = LineSet()
    for line in (1, 8, 9, 1_000_000, 8):
        lines.add(line)
    assert lines.count == 4
    assert [
        line for line in (0, 1, 7, 8, 9, 10, 999_999, 1_000_000, 5_000_000) if line in lines
    ] == [
        1,
        8,
        9,
        1_000_000,
    ]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for count in (2_000, 20_000):
        path = write_many(tmp_path / f"{count}.jsonl", count)
        tracemalloc.start()
        summarise(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 200_000, peaks
