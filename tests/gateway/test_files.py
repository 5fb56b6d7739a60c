"""Files through OpenAI's client, and forms that no client should send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.conftest import Gateway, new_key, running_gateway
from tokenmill.files.file_table import FileTable
from tokenmill.files.object_store import ObjectStore
from tokenmill.files.removal import remove_old

pytestmark = pytest.mark.redis
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
BOUNDARY = "xxBOUNDARYxx"


@pytest.fixture
async def gateway(redis_url: str, database: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with keys and a folder of files, which takes files of 1,000 bytes."""
    async with running_gateway(
        redis_url, database, is_open=False, files=str(tmp_path / "files"), upload_bytes=1_000
    ) as gateway:
        yield gateway


@pytest.fixture
def key(database: str) -> str:
    return new_key(database, "acme")


@pytest.fixture
async def client(gateway: Gateway, key: str) -> AsyncIterator[Any]:
    async with gateway.client(key) as client:
        yield client


@pytest.fixture
async def raw(gateway: Gateway, key: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/v1", headers=headers) as client:
        yield client


def objects(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "files").iterdir())


async def test_an_uploaded_file_is_listed_read_and_deleted(client: Any, tmp_path: Path) -> None:
    first = await client.files.create(file=("in.jsonl", LINE), purpose="batch")
    second = await client.files.create(
        file=("b", b"0123456789"),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (first.filename, first.bytes, first.purpose) == ("in.jsonl", len(LINE), "batch")
    assert first.expires_at is None
    assert second.expires_at == second.created_at + 3600
    assert await client.files.retrieve(first.id) == first
    pages = client.files.list(limit=1)
    assert [file.id async for file in pages] == [second.id, first.id]
    assert [file.id async for file in client.files.list(purpose="batch", order="asc")] == [first.id]
    assert (await client.files.content(first.id)).content == LINE
    assert objects(tmp_path) == sorted([first.id, second.id])
    assert (await client.files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(first.id)
    assert objects(tmp_path) == [second.id]


RANGES: Any = [
    ("bytes=0-3", 206, b"0123"),
    ("bytes=8-", 206, b"89"),
    ("bytes=-3", 206, b"789"),
    ("bytes=4-99", 206, b"456789"),
    ("bytes=0-1,3-4", 200, b"0123456789"),
    ("bytes=10-", 416, None),
    ("bytes=5-4", 416, None),
]


async def test_a_range_of_a_file_is_sent_as_its_header_asks(raw: httpx.AsyncClient) -> None:
    form = {"file": ("digits", b"0123456789")}
    file_id = (await raw.post("/files", data={"purpose": "evals"}, files=form)).json()["id"]
    for wanted, status, got in RANGES:
        answer = await raw.get(f"/files/{file_id}/content", headers={"Range": wanted})
        assert answer.status_code == status, wanted
        if got is None:
            assert answer.headers["content-range"] == "bytes */10"
            assert answer.json()["error"]["code"] == "invalid_range"
        else:
            assert answer.content == got


async def test_a_file_of_another_tenant_is_as_unknown(
    gateway: Gateway, client: Any, database: str
) -> None:
    file = await client.files.create(file=("in.jsonl", LINE), purpose="batch")
    unknown = f"file-{'0' * 24}"
    headers = {"Authorization": f"Bearer {new_key(database, 'other')}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/v1", headers=headers) as other:
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            foreign = await other.request(method, f"/files/{file.id}{path}")
            missing = await other.request(method, f"/files/{unknown}{path}")
            assert foreign.status_code == missing.status_code == 404
            assert foreign.text.replace(file.id, unknown) == missing.text
        assert (await other.get("/files")).json()["data"] == []
        assert (await other.get("/files", params={"after": file.id})).status_code == 400
    assert (await client.files.retrieve(file.id)).id == file.id


def part(name: str, value: bytes, file_name: str | None = None) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'
    if file_name is not None:
        head += f'; filename="{file_name}"'
    return f"{head}\r\n\r\n".encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE = part("purpose", b"batch")
FILE = part("file", LINE, "in.jsonl")


WRONG: Any = [
    (PURPOSE + part("file", LINE) + END, 400, "no name"),
    (PURPOSE + part("file", LINE, "../in.jsonl") + END, 400, "no path"),
    (PURPOSE + FILE + FILE + END, 400, "one file"),
    (PURPOSE + part("file", b"", "in.jsonl") + END, 400, "no bytes"),
    (PURPOSE + FILE, 400, "ended early"),
    (PURPOSE + FILE[:-20], 400, "ended early"),
    (PURPOSE + END, 400, "has a file"),
    (FILE + END, 400, "purpose must be one of"),
    (part("purpose", b"homework") + FILE + END, 400, "purpose must be one of"),
    (PURPOSE + part("colour", b"red") + FILE + END, 400, "has no 'colour'"),
    (PURPOSE + part("expires_after[seconds]", b"4000") + FILE + END, 400, "anchor"),
    (
        part("expires_after[seconds]", b"10")
        + part("expires_after[anchor]", b"created_at")
        + FILE
        + PURPOSE
        + END,
        400,
        "from 3600 to 2592000",
    ),
    (PURPOSE + part("file", b"x" * 1_001, "in.jsonl") + END, 413, "more than 1000 bytes"),
    (PURPOSE + part("file", b"x" * 90_000, "in.jsonl") + END, 413, "more than 1000 bytes"),
    (b"no form at all", 400, "no multipart form"),
]


async def test_a_wrong_upload_is_refused_in_a_sentence_and_leaves_nothing(
    raw: httpx.AsyncClient, tmp_path: Path
) -> None:
    kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    for body, status, says in WRONG:
        answer = await raw.post("/files", content=body, headers=kind)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True)
        assert objects(tmp_path) == []
    assert (await raw.get("/files")).json()["data"] == []
    assert (await raw.post("/files", content=PURPOSE + FILE + END, headers=kind)).is_success


async def test_a_body_that_is_no_form_is_refused(raw: httpx.AsyncClient) -> None:
    for kind in ("application/json", "multipart/form-data"):
        answer = await raw.post("/files", content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 415


async def test_a_store_that_is_away_is_answered_with_503_and_the_row_goes(
    raw: httpx.AsyncClient, database: str, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.rmdir()
    folder.write_text("no folder")
    kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    answer = await raw.post("/files", content=PURPOSE + FILE + END, headers=kind)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "files_unavailable")
    folder.unlink()
    folder.mkdir()
    assert (await raw.post("/files", content=PURPOSE + FILE + END, headers=kind)).is_success
    table = FileTable(database)
    assert len(table.page("acme", 0, limit=9)) == 1
    table.close()


async def test_an_expired_file_is_hidden_at_once_and_removed_by_the_sweep(
    client: Any, database: str, tmp_path: Path
) -> None:
    file = await client.files.create(
        file=("in.jsonl", LINE),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    table, store = FileTable(database), ObjectStore(str(tmp_path / "files"))
    end_ms = table.page("acme", 0, limit=1)[0].expires_ms
    assert end_ms is not None
    assert table.page("acme", end_ms, limit=1) == []
    assert remove_old(table, store, end_ms - 1) == 0
    assert remove_old(table, store, end_ms) == 1
    assert (objects(tmp_path), table.find(file.id)) == ([], None)
    table.close()


async def test_a_bucket_behind_plain_http_takes_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.readexactly(5)
        writer.write(b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for name, value in (
        ("ENDPOINT", f"http://127.0.0.1:{port}"), ("REGION", "us-east-1"),
        ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"),
    ):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    async with server, ObjectStore("s3://bucket/files").writing("one") as object_:
        await object_.write(b"bytes")
    assert heads[0].startswith(b"PUT /bucket/files/one ")
