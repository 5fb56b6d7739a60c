"""Several choices of one job: each token is delivered once, whatever the server lost."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.client.operations.support import JOB, answer_of_several, tokens_and_text, words
from tokenmill.operations.stream_position import StreamPosition
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobResult, JobStatus

LENGTHS = st.lists(st.integers(0, 12), min_size=2, max_size=4)


def logged(result: JobResult, log: list[Chunk], rng: random.Random) -> list[Chunk]:
    """Return the chunks that a worker appends to this log up to its end.

    Runs of tokens of any choice come in any order.
    """
    has = {choice.index: 0 for choice in result.choices}
    ended = {chunk.choice for chunk in log if chunk.finish_reason is not None}
    for chunk in log:
        has[chunk.choice] = chunk.end
    chunks = []
    while still := [choice for choice in result.choices if choice.index not in ended]:
        choice = rng.choice(still)
        start = has[choice.index]
        stop = has[choice.index] = min(len(choice.token_ids), start + rng.choice((1, 1, 2, 3)))
        is_end = start == len(choice.token_ids)
        ids = choice.token_ids[start:stop]
        chunk = Chunk(
            job_id=JOB,
            index=start,
            choice=choice.index,
            token_ids=ids,
            text="!" if is_end else words(ids[0], ids[-1] + 1),
            text_ends=tuple(len(words(ids[0], token + 1)) for token in ids) if len(ids) > 1 else (),
            finish_reason=FinishReason.STOP if is_end else None,
            n=len(result.choices),
        )
        if is_end:
            ended.add(choice.index)
        chunks.append(chunk)
    return chunks


class Reader:
    """A subscriber that misses messages, disconnects and resumes with its position."""

    def __init__(self, rng: random.Random) -> None:
        self.cursor = StreamPosition(JOB)
        self.received: list[Chunk] = []
        self._rng = rng

    def receive(self, message: Chunk, log: list[Chunk]) -> None:
        """`log` is what the log has when the message comes."""
        if self._rng.random() < 0.2:
            self.cursor = StreamPosition(JOB, self.received[-1].position if self.received else 0)
        if self._rng.random() < 0.3:
            return
        accepted = self.cursor.accept(message)
        if accepted is None:
            assert self.cursor.log_start == "-"
            accepted = list(self.cursor.accept_log(log))
        self.received += accepted


@given(LENGTHS, st.randoms(use_true_random=False), st.booleans())
def test_tokens_of_each_choice_are_yielded_once_after_losses_and_repeated_appends(
    lengths: list[int], rng: random.Random, ends_in_result: bool
) -> None:
    result = answer_of_several(lengths)
    reader, log = Reader(rng), list[Chunk]()
    # workers, after each of which the server lost the log's tail
    for _ in range(rng.randint(0, 3)):
        made = logged(result, log, rng)
        for chunk in made[: rng.randint(0, len(made))]:
            log.append(chunk)
            reader.receive(chunk, log)
        del log[rng.randint(0, len(log)) :]
    for chunk in logged(result, log, rng):
        log.append(chunk)
        reader.receive(chunk, log)
    reader.cursor = StreamPosition(JOB, reader.received[-1].position if reader.received else 0)
    end = Chunk(job_id=JOB, index=lengths[0], status=JobStatus.SUCCEEDED, n=len(lengths))
    if not ends_in_result:
        reader.received += reader.cursor.accept_log(log)
    last_told = reader.cursor.accept(end)
    assert ends_in_result or last_told is not None, "every choice has reached its end"
    reader.received += reader.cursor.accept_result(result) if last_told is None else last_told
    for choice in result.choices:
        mine = [
            chunk
            for chunk in reader.received
            if chunk.choice == choice.index and chunk.status is None
        ]
        assert tokens_and_text(mine) == (list(choice.token_ids), choice.text)
        assert [chunk.finish_reason for chunk in mine if chunk.finish_reason] == [FinishReason.STOP]
    assert [chunk.is_last for chunk in reader.received].count(True) == 1
    assert reader.received[-1].is_last
