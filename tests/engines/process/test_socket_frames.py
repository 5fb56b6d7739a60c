"""Tests of the socket between engine process and worker: reports arrive whole and in order."""

import asyncio
import socket
import threading
from typing import NoReturn

import msgspec
import pytest

from tokenmill_worker.contract.messages import EngineFailed, LoadProgress, Report
from tokenmill_worker.engines.process.socket_frames import LENGTH_BYTES, FrameReader, FrameWriter


def fail() -> NoReturn:
    raise AssertionError("the connection broke")


def framed(report: Report) -> bytes:
    payload = msgspec.msgpack.encode(report)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


async def connected() -> tuple[FrameReader, "asyncio.Queue[Report | None]", socket.socket]:
    ours, theirs = socket.socketpair()
    reports: asyncio.Queue[Report | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    _, frames = await loop.create_unix_connection(
        lambda: FrameReader(reports.put_nowait), sock=ours
    )
    return frames, reports, theirs


@pytest.mark.parametrize("cut", [1, 3, 5, 40])
async def test_a_report_that_arrives_in_pieces_is_read_whole(cut: int) -> None:
    frames, reports, theirs = await connected()
    sent = [LoadProgress(f"part {number}", 0.5) for number in range(5)]
    data = b"".join(map(framed, sent))
    for start in range(0, len(data), cut):
        theirs.send(data[start : start + cut])
        await asyncio.sleep(0)
    theirs.close()
    async with asyncio.timeout(30):
        assert [await reports.get() for _ in range(6)] == [*sent, None]
        await frames.ended.wait()


async def test_bytes_that_are_no_report_end_the_reader() -> None:
    frames, reports, theirs = await connected()
    theirs.send(
        framed(LoadProgress("loading", 0.1))
        + b"\x03\x00\x00\x00abc"
        + framed(LoadProgress("never read", 0.2))
    )
    async with asyncio.timeout(30):
        assert await reports.get() == LoadProgress("loading", 0.1)
        assert isinstance(await reports.get(), EngineFailed)
        frames.close()
        await frames.ended.wait()
    theirs.close()
    assert reports.empty()


async def test_a_worker_that_does_not_read_delays_no_step_and_gets_every_report_later() -> None:
    ours, theirs = socket.socketpair()
    # more than a socket holds
    sent = [LoadProgress(f"{number}" + "x" * 10_000, 0.0) for number in range(200)]

    def put_all() -> None:
        for report in sent:
            outlet.put(report)

    outlet = FrameWriter(theirs, on_broken=fail)
    talking = threading.Thread(target=put_all)
    talking.start()
    talking.join(60)
    assert not talking.is_alive()  # although no byte was read
    reports: asyncio.Queue[Report | None] = asyncio.Queue()
    await asyncio.get_running_loop().create_unix_connection(
        lambda: FrameReader(reports.put_nowait), sock=ours
    )
    async with asyncio.timeout(60):
        assert [await reports.get() for _ in sent] == sent
        outlet.put(LoadProgress("the last", 1.0))
        assert await reports.get() == LoadProgress("the last", 1.0)
        await asyncio.to_thread(outlet.close)
        theirs.close()
        assert await reports.get() is None
