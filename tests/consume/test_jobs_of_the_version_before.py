"""A job that an older worker began is ended by this one: its chunks count all choices, and so do
its log's entries.
"""

import asyncio

import msgspec
import pytest

from tests.consume.queue import QUEUE, Queue
from tests.publish.support import MODEL, event
from tests.support.tokenizers import byte_level
from tokenmill import AsyncClient
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.consume.input_processor import InputProcessor
from tokenmill_worker.jobs import AdmittedJob, FinishedJob
from tokenmill_worker.publish.publisher import Publisher

pytestmark = pytest.mark.redis
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def log_as_before(
    queue: Queue, job: str, tokens: str, *, ended: tuple[int, ...] = ()
) -> None:
    """`tokens`: the number of a choice and its next letter, in turns; `ended`: choices that end
    without a token.
    """
    places: dict[int, int] = {}
    is_lone = set(tokens[::2]) == {"0"} and not ended
    index = 0
    for index, (number, letter) in enumerate(zip(tokens[::2], tokens[1::2], strict=True), 1):
        choice = int(number)
        place = places.get(choice, 0)
        places[choice] = place + 1
        chunk = Chunk(
            job_id=job, index=index - 1, choice=choice, token_ids=(ord(letter),), text=letter
        )
        await publish(
            queue, msgspec.structs.replace(chunk, place=None if is_lone else place), f"{index}-0"
        )
    for number_of_end, choice in enumerate(ended, 1):
        end = Chunk(
            job_id=job, index=index, choice=choice, place=places.get(choice, 0), finish_reason=STOP
        )
        await publish(queue, end, f"{index}-{number_of_end}")


async def publish(queue: Queue, chunk: Chunk, entry: str) -> None:
    await queue.redis.xadd(queue.keys.log(chunk.job_id), {"chunk": encode(chunk)}, id=entry)
    await queue.redis.publish(queue.keys.chunks(chunk.job_id), encode(chunk))


async def go_on(queue: Queue) -> tuple[Publisher, AdmittedJob]:
    worker = queue.worker("new")
    (delivery,) = await worker.claim(1)
    admitted = InputProcessor(byte_level(), MODEL).process(delivery)
    assert isinstance(admitted, AdmittedJob)
    publisher = Publisher(worker)
    publisher.open(admitted)
    return publisher, admitted


async def chunks_of(client: AsyncClient, job: str, position: str | int = 0) -> list[Chunk]:
    return [chunk async for chunk in client.stream(job, starting_after=position, timeout=30)]


def tokens_and_text(chunks: list[Chunk], choice: int = 0) -> tuple[list[int], str]:
    mine = [chunk for chunk in chunks if chunk.choice == choice and chunk.token_ids]
    return [index for chunk in mine for index in range(chunk.index, chunk.end)], "".join(
        chunk.text for chunk in mine
    )


async def finish(queue: Queue, finished: FinishedJob) -> None:
    assert await queue.worker("new").finish([finished]) == [True]


async def test_a_lone_choice_goes_on_without_a_seam(queue: Queue, redis_url: str) -> None:
    job = await queue.submit()
    async with AsyncClient(redis_url, queue=QUEUE) as client:
        reading = asyncio.create_task(chunks_of(client, job))
        await asyncio.sleep(0.1)
        await log_as_before(queue, job, "0a0b")
        publisher, admitted = await go_on(queue)
        assert admitted.generation.resumed == ((97, 98),)
        token = admitted.delivery.token
        await publisher.handle([event("c", job, token=token)])
        [finished] = (await publisher.handle([event("d", job, end=LENGTH, token=token)])).finished
        entries = [entry for entry, _ in await queue.redis.xrange(queue.keys.log(job))]
        assert entries == [b"1-0", b"2-0", b"3-0", b"4-0"]
        await finish(queue, finished)
        assert tokens_and_text(await reading) == ([0, 1, 2, 3], "abcd")
        assert tokens_and_text(await chunks_of(client, job, 3)) == ([3], "d")


async def test_several_choices_go_on_without_a_seam_too(queue: Queue, redis_url: str) -> None:
    job = await queue.submit(n=3)
    async with AsyncClient(redis_url, queue=QUEUE) as client:
        reading = asyncio.create_task(chunks_of(client, job))
        first = client.stream(job, timeout=30)
        await log_as_before(queue, job, "0a1x1y0b", ended=(2,))
        seen = [await anext(first) for _ in range(3)]
        await first.aclose()
        assert seen[-1].position == "1.2"
        publisher, admitted = await go_on(queue)
        assert admitted.generation.resumed == ((97, 98), (120, 121), ())
        assert admitted.generation.done == (2,)
        token = admitted.delivery.token
        await publisher.handle(
            [event("z", job, choice=1, token=token), event("c", job, token=token)]
        )
        ends = [
            event("d", job, end=LENGTH, token=token),
            event("!", job, choice=1, end=LENGTH, token=token),
        ]
        [finished] = (await publisher.handle(ends)).finished
        entries = [entry for entry, _ in await queue.redis.xrange(queue.keys.log(job))]
        assert entries[-5:] == [b"4-1", b"5-0", b"6-0", b"7-0", b"8-0"]
        late = await chunks_from_log(client, job)
        await finish(queue, finished)
        assert finished.result.order == ()
        for chunks in (await reading, late, await chunks_of(client, job)):
            assert [tokens_and_text(chunks, choice) for choice in range(3)] == [
                ([0, 1, 2, 3], "abcd"), ([0, 1, 2, 3], "xyz!"), ([], ""),
            ]  # fmt: skip
        rest = await chunks_of(client, job, seen[-1].position)
        assert [tokens_and_text([*seen, *rest], choice)[1] for choice in range(3)] == [
            "abcd",
            "xyz!",
            "",
        ]
        assert rest[-1].status is JobStatus.SUCCEEDED


async def chunks_from_log(client: AsyncClient, job: str) -> list[Chunk]:
    """Return the chunks that a subscriber gets before the end: all but the last."""
    stream, chunks = client.stream(job, timeout=30), list[Chunk]()
    async for chunk in stream:
        chunks.append(chunk)
        if sum(len(each.token_ids) for each in chunks) == 8:
            break
    await stream.aclose()
    return chunks
