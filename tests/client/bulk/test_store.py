"""SQLite, PostgreSQL and a file beside an output store batches alike."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import inspect

from tests.client.bulk.support import result
from tokenmill import Client
from tokenmill.bulk import Batch, BatchNotFound, BatchState, BatchStore, Totals, open_store
from tokenmill.bulk import store as sql
from tokenmill.bulk.batch import check_metadata, window_ms
from tokenmill.bulk.formats.input_file import BadLine
from tokenmill.bulk.formats.output_line import EXPIRED, unanswered
from tokenmill.errors import ConfigurationError
from tokenmill.sql.engine import open_engine
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.openai_batch import BatchError
from tokenmill_schemas.result import JobResult, JobStatus
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record import ResultStore

pytestmark = pytest.mark.redis

BATCH = Batch(
    id="batch_1",
    queue="q",
    tenant="acme",
    model="m",
    endpoint="/v1/completions",
    any_model=True,
    input_file="/in.jsonl",
    metadata={"k": "v"},
    errors=(BatchError(code="c", message="m", line=2),),
    total=9,
    last_line=10,
    digest="d",
    created_ms=1_000,
    expires_ms=2_000,
)


def test_a_stored_batch_is_read_back_unchanged(store: BatchStore) -> None:
    store.create(BATCH)
    store.create(msgspec.structs.replace(BATCH, tenant="other"))  # again changes nothing
    assert store.get("batch_1") == BATCH
    named = msgspec.structs.replace(
        BATCH, output_file="/out.jsonl", error_file="/e.jsonl", total=8, errors=()
    )
    store.describe(named)
    assert store.get("batch_1") == named
    with pytest.raises(BatchNotFound, match="batch_2"):
        store.get("batch_2")


def test_a_state_changes_only_from_an_expected_state(store: BatchStore) -> None:
    store.create(BATCH)
    assert store.move("batch_1", BatchState.IN_PROGRESS, [BatchState.VALIDATING])
    assert not store.move("batch_1", BatchState.IN_PROGRESS, [BatchState.VALIDATING])
    assert store.move(
        "batch_1", BatchState.CANCELLING, [BatchState.VALIDATING, BatchState.IN_PROGRESS]
    )
    assert not store.move("batch_1", BatchState.FINALIZING, [BatchState.IN_PROGRESS])
    assert store.move("batch_1", BatchState.CANCELLED, [BatchState.CANCELLING])
    assert not store.move("none", BatchState.CANCELLED, [BatchState.CANCELLING])
    found = store.get("batch_1")
    assert found.state is BatchState.CANCELLED
    assert 0 < found.started_ms <= found.cancelling_ms <= found.finished_ms


def test_progress_does_not_change_the_state(store: BatchStore) -> None:
    store.create(BATCH)
    totals = Totals(completed=3, failed=1, input_tokens=7, output_tokens=5)
    store.progress("batch_1", submitted=6, over_line=4, totals=totals)
    found = store.get("batch_1")
    assert (found.submitted, found.over_line, found.totals, found.state) == (
        6,
        4,
        totals,
        BatchState.VALIDATING,
    )
    assert found.seen_ms > 0
    assert not found.is_submitted


def test_lists_are_paged_newest_first(store: BatchStore) -> None:
    for number in range(5):
        store.create(
            msgspec.structs.replace(BATCH, id=f"batch_{number}", created_ms=1_000 + number)
        )
    assert [batch.id for batch in store.newest(2)] == ["batch_4", "batch_3"]
    assert [batch.id for batch in store.newest(9, after="batch_3")] == [
        "batch_2",
        "batch_1",
        "batch_0",
    ]


def test_a_refused_line_is_stored_once(store: BatchStore) -> None:
    store.create(BATCH)
    lines = [
        BadLine(2, None, "invalid_json_line", "what?"),
        BadLine(7, "x", "unknown_parameter", "foo", "foo", 400),
    ]
    for _ in range(2):
        store.reject("batch_1", lines)
    assert list(store.rejected("batch_1")) == lines


async def test_the_results_of_a_batch_are_those_of_its_jobs(redis_url: str, database: str) -> None:
    store = ResultStore(database, queue="q")
    ends = [result("batch_1", line) for line in range(1, 5)]
    ends += [result("batch_1", 5, JobStatus.EXPIRED), result("batch_2", 1)]
    await store.record([_finished(end) for end in ends])
    await store.close()
    with Client(redis_url, queue="q", database=database) as client:
        batches = open_store(client)
        batches.create(BATCH)
        batches.reject("batch_1", [BadLine(9, None, "c", "m"), unanswered(10, "line-10", EXPIRED)])
        found = await asyncio.to_thread(lambda: list(batches.results("batch_1")))
        assert [job.job_id for job in found] == [f"batch_1-{line}" for line in range(1, 6)]
        assert found[0].metadata["custom_id"] == "line-1"
        assert set(batches.recorded(["batch_1-2", "none"])) == {"batch_1-2"}
        assert batches.totals(BATCH, with_tokens=True) == Totals(
            completed=4,
            failed=3,
            expired=2,
            input_tokens=25,
            cached_tokens=10,
            output_tokens=10,
            reasoning_tokens=5,
        )
        batches.close()


def _finished(end: JobResult) -> FinishedJob:
    request = JobRequest(job_id=end.job_id, prompt="x", batch_id=end.job_id.rpartition("-")[0])
    return FinishedJob(1, end, Chunk(job_id=end.job_id, index=2, status=end.status), request)


def test_the_columns_are_those_of_the_tables(database: str) -> None:
    engine = open_engine(database)
    tables = inspect(engine)
    found = {
        name: {c["name"] for c in tables.get_columns(name)}
        for name in ("batches", "batch_items", "jobs")
    }
    engine.dispose()
    assert set(sql._COLUMNS) == found["batches"] - {"due_ms"}  # which the tasks alone read
    assert set(sql._ITEMS) <= found["batch_items"]
    assert set(sql._JOBS) <= found["jobs"]


def test_a_database_without_the_tables_names_the_command(redis_url: str, tmp_path: Path) -> None:
    empty = f"sqlite:///{tmp_path}/empty.db"
    open_engine(empty, may_create=True).connect().close()
    with Client(redis_url, queue="q", database=empty) as client:
        store = open_store(client)
        with pytest.raises(ConfigurationError, match="tokenmill db upgrade"):
            store.get("batch_1")
        store.close()


def test_a_store_without_a_database_is_a_file_beside_the_output(
    client: Client, tmp_path: Path
) -> None:
    store = open_store(client, tmp_path / "out?.jsonl")
    store.create(BATCH)
    assert store.totals(BATCH, with_tokens=True) is None
    assert list(store.results(BATCH.id)) == []
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out?.jsonl.batch.db"]
    again = open_store(client, tmp_path / "out?.jsonl")
    assert again.get(BATCH.id) == BATCH
    again.close()


@pytest.mark.parametrize("folder", ["/proc", "/dev/null/none"])
def test_a_store_whose_file_cannot_be_made_is_refused_by_name(client: Client, folder: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(batch\.db|SQLite file) cannot be made: \w+"):
        open_store(client, Path(folder) / "out.jsonl")


def test_a_tilde_in_an_output_name_is_taken_literally(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(client, Path("~nobody.jsonl")).close()
    assert [path.name for path in tmp_path.iterdir()] == ["~nobody.jsonl.batch.db"]


def test_a_store_without_database_and_output_is_refused(client: Client) -> None:
    with pytest.raises(ConfigurationError, match="batches are kept in a database"):
        open_store(client)


@pytest.mark.parametrize(
    ("text", "ms"), [("24h", 86_400_000), ("30m", 1_800_000), ("7d", 604_800_000), ("5s", 5_000)]
)
def test_a_completion_window_with_a_unit_is_read(text: str, ms: int) -> None:
    assert window_ms(text) == ms


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "0h", "1w", "99999999999h"])
def test_an_invalid_completion_window_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="24h"):
        window_ms(text)


def test_metadata_has_the_apis_limits() -> None:
    with pytest.raises(ConfigurationError, match="16"):
        check_metadata({str(number): "" for number in range(17)})
    with pytest.raises(ConfigurationError, match="512"):
        check_metadata({"k": "x" * 513})
