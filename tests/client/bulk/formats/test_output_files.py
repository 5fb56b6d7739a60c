"""Output files: resumed after any cut, each line once, by one process at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.bulk.support import names, result
from tokenmill.bulk.batch import Batch, Totals
from tokenmill.bulk.collector import Collector
from tokenmill.bulk.formats.input_file import BadLine
from tokenmill.bulk.formats.output_files import OutputFiles, Paths
from tokenmill.bulk.formats.output_line import of_bad_line, of_result
from tokenmill.errors import ConfigurationError
from tokenmill_schemas.result import JobStatus

BATCH = "batch_abc"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.of(tmp_path / "out.jsonl")


def fill(paths: Paths) -> None:
    with OutputFiles(paths) as files:
        files.save_record(Batch(id=BATCH, queue="q"))
        files.write([of_result(BATCH, result(BATCH, line)) for line in (1, 3)])
        files.write([of_bad_line(BATCH, BadLine(2, "line-2", "x", "y", None, 400))])
        files.write([of_result(BATCH, result(BATCH, 4, JobStatus.EXPIRED))])


def test_a_resumed_file_has_the_lines_that_were_written(paths: Paths) -> None:
    fill(paths)
    assert (names(paths.output), names(paths.errors)) == (
        ["line-1", "line-3"],
        ["line-2", "line-4"],
    )
    with OutputFiles(paths) as files:
        record, done = files.load_record(), files.resume()
    assert record is not None
    assert record.id == BATCH
    assert [line in done.lines for line in range(1, 6)] == [True, True, True, True, False]
    assert done.totals == Totals(
        completed=2,
        failed=2,
        expired=1,
        input_tokens=10,
        cached_tokens=4,
        output_tokens=4,
        reasoning_tokens=2,
    )


def test_a_file_cut_anywhere_loses_only_the_line_of_the_cut(paths: Paths) -> None:
    fill(paths)
    whole = paths.output.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in (0, 1, first - 1, first, first + 1, len(whole) - 1, len(whole)):
        paths.output.write_bytes(whole[:cut])
        with OutputFiles(paths) as files:
            done = files.resume()
            assert done.totals.completed == whole[:cut].count(b"\n")
            files.write([of_result(BATCH, result(BATCH, 9))])
        assert names(paths.output)[-1] == "line-9"
        assert len(names(paths.output)) == whole[:cut].count(b"\n") + 1


FILLS = """
import resource, sys
from pathlib import Path
from tokenmill.bulk.formats.output_line import of_result
from tokenmill.bulk.formats.output_files import OutputFiles, Paths
from tokenmill.errors import ConfigurationError
from tests.client.bulk.support import result

resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))  # a small disk
try:
    with OutputFiles(Paths.of(Path(sys.argv[1]))) as files:
        for line in range(1, 100):
            files.write([of_result("batch_abc", result("batch_abc", line))])
            print(line)
except ConfigurationError as error:
    print(error)
"""


def test_a_full_disk_is_an_error_of_one_sentence_and_keeps_the_written_lines(paths: Paths) -> None:
    command = [sys.executable, "-c", FILLS, str(paths.output)]
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    ).stdout.splitlines()
    assert said[-1] == f"{paths.output}: File too large"
    with OutputFiles(paths) as files:
        assert files.resume().totals.completed == len(said) - 1 > 1


def test_a_second_writer_of_one_output_is_refused(paths: Paths) -> None:
    with (
        OutputFiles(paths),
        pytest.raises(ConfigurationError, match="being written"),
        OutputFiles(paths),
    ):
        pass
    assert not paths.output.exists()  # nothing was begun


def test_files_not_written_by_a_batch_are_refused(paths: Paths) -> None:
    for content in ("hello\n", '{"id": "x"}\n', "[]\n"):
        paths.output.write_text(content)
        with (
            OutputFiles(paths) as files,
            pytest.raises(ConfigurationError, match="none of a batch's"),
        ):
            files.resume()


def test_a_damaged_record_and_a_folder_are_errors(paths: Paths, tmp_path: Path) -> None:
    fill(paths)
    paths.record.write_text("{")
    with OutputFiles(paths) as files, pytest.raises(ConfigurationError, match="damaged"):
        files.load_record()
    with pytest.raises(ConfigurationError, match="directory"):
        Paths.of(tmp_path)


def test_output_names_that_the_system_refuses_are_an_error_of_one_sentence(tmp_path: Path) -> None:
    """The names of the errors, the record and its draft are longer than the output's."""
    Paths.of(tmp_path / f"{'n' * 239}.jsonl")
    for length in (246, 249, 250, 256, 5000):
        with pytest.raises(ConfigurationError, match="File name too long"):
            Paths.of(tmp_path / f"{'n' * (length - 6)}.jsonl")
    for errors in (tmp_path / ("e" * 256), tmp_path / ("f" * 256) / "e"):
        with pytest.raises(ConfigurationError, match="File name too long"):
            Paths.of(tmp_path / "out.jsonl", errors)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="there is no folder"):
        Paths.of(tmp_path / "file" / "out.jsonl")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_a_name_with_nul_or_a_surrogate_is_an_error_of_one_sentence(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the name of a file"):
        Paths.of(tmp_path / name)


def test_the_batchs_input_is_never_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("x")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "out.batch").hardlink_to(source)
    for paths in (
        Paths.of(source),
        Paths.of(tmp_path / "link"),
        Paths.of(tmp_path / "new", source),
        Paths.of(tmp_path / "out"),
    ):
        with pytest.raises(ConfigurationError, match="is the batch's input"):
            paths.check_input(source)
    Paths.of(tmp_path / "new").check_input(source)
    Paths.of(tmp_path / "new").check_input(tmp_path / "elsewhere")


def test_the_rate_counts_only_tokens_generated_in_this_run() -> None:
    collector = Collector(BATCH, began_ms=1_000_000)
    old, new = (
        result(BATCH, 1, finished_ms=940_000),
        result(BATCH, 2, finished_ms=1_000_001),
    )
    collector.take([old, new])
    collector.take([new])
    assert (collector.totals.output_tokens, collector.generated) == (4, 2)
