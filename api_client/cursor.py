"""How far one subscriber has been told a job's answer; turns log entries, messages and results into chunks that
he has not seen, each exactly once and in order.

    told ────────── next_index ───── (a message from here on is told) ───── (beyond: a gap, read the log)

It knows no connection: whoever drives it reads the log when it says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from schemas.chunk import Chunk
from schemas.result import ChoiceResult, JobResult, JobStatus


class _Told:
    """What was told of one choice, or silently passed. `marks`: after so many tokens, so many characters."""

    __slots__ = ("chars", "marks", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.chars = 0
        self.marks: dict[int, int] = {}


class StreamCursor:
    """`starting_after` is a number of tokens (all choices together) that the subscriber has already.

    A token of several choices is known by its place in its choice: another worker, which goes on where a server that
    lost its last moments believes the log to end, may make the lost tokens again in another order.
    """

    __slots__ = ("_ended", "_has_hole", "_silent_until", "_told", "is_over", "is_torn", "job_id", "next_index")

    def __init__(self, job_id: str, starting_after: int = 0) -> None:
        self.job_id = job_id
        self.next_index = 0
        self.is_over = False
        self.is_torn = False  # the log tells another order than we did: read it from its start
        self._silent_until = starting_after  # what ends at or before this has been told in an earlier life
        self._has_hole = False  # the log's beginning had expired: places say nothing
        self._told: defaultdict[int, _Told] = defaultdict(_Told)  # per choice
        self._ended: set[int] = set()

    @property
    def log_start(self) -> str:
        """The log entry to read from; entries at the cursor itself may be ends without a token."""
        return f"{self.next_index}-0" if self.next_index and not self.is_torn else "-"

    def accept(self, chunk: Chunk) -> list[Chunk] | None:
        """The chunk as it is to be told (nothing, if it was told before); None when something before it is missing."""
        if self.is_over:
            return []
        if (
            chunk.index == self.next_index >= self._silent_until
            and chunk.place is None
            and chunk.status is None
            and chunk.token_ids
        ):  # as a rule
            self._advance(chunk, 0)
            return [chunk]
        if chunk.index > self.next_index:
            return None
        if chunk.is_last:
            if self._may_lack_an_end(chunk):
                return None
            self.is_over = True
            return [chunk]
        seen = self._num_seen(chunk)
        if seen < 0:
            self.is_torn = True
            return None
        if not chunk.token_ids:
            return self._accept_end(chunk)
        if seen >= len(chunk.token_ids):
            return []
        told = self._unseen(chunk, seen)
        self._advance(chunk, seen)
        return [told] if self.next_index > self._silent_until else []

    def accept_log(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """A page of the log, which has no holes. The first begins at the cursor or before it, or, if that is torn, at
        the log's start. Where the cursor is torn afterwards, the rest of the page was not taken.
        """
        from_start, self.is_torn = self.is_torn or not self.next_index, False
        for chunk in chunks:
            if self._num_seen(chunk) < 0:
                if not from_start:
                    self.is_torn = True
                    return
                self._skip_to(chunk)
            yield from self.accept(chunk) or ()

    def accept_result(self, result: JobResult) -> Iterator[Chunk]:
        """The rest of an answer whose log is gone: one chunk per token, then the last chunk."""
        if self.is_over:
            return
        choices = result.choices
        for index, choice in _as_told(result):
            if index >= self._told[choice.index].tokens:
                yield from self._retell(result, choice, index)
        for choice in choices if len(choices) > 1 else ():
            end = Chunk(
                job_id=self.job_id,
                index=self.next_index,
                choice=choice.index,
                text=choice.text[self._told[choice.index].chars :],
                finish_reason=choice.finish_reason,
                attempt=result.attempt,
            )
            yield from self._accept_end(end)
        self.is_over = True
        yield Chunk(
            job_id=self.job_id,
            index=self.next_index,
            text=choices[0].text[self._told[0].chars :] if len(choices) == 1 else "",
            finish_reason=result.finish_reason,
            attempt=result.attempt,
            status=result.status,
            usage=result.usage,
            error=result.error,
        )

    def _retell(self, result: JobResult, choice: ChoiceResult, index: int) -> Iterator[Chunk]:
        told = self._told[choice.index].chars
        end = choice.text_ends[index] if index < len(choice.text_ends) else told
        chunk = Chunk(
            job_id=self.job_id,
            index=self.next_index,
            choice=choice.index,
            token_ids=(choice.token_ids[index],),
            text=choice.text[told:end],
            logprobs=choice.logprobs[index : index + 1] if choice.logprobs else None,
            attempt=result.attempt,
        )
        self._advance(chunk, 0)
        if chunk.end > self._silent_until:
            yield chunk

    def _may_lack_an_end(self, last: Chunk) -> bool:
        """Did a choice hold back text when it was broken off, and no chunk told it, the log being away? A lone choice's
        is in the last chunk; how many there are is known by their tokens only.
        """
        begun = [choice for choice, told in self._told.items() if told.tokens]
        is_open = any(choice not in self._ended for choice in begun)
        was_broken_off = last.status not in (None, JobStatus.SUCCEEDED) and not last.text
        return is_open and (was_broken_off or max(begun) > 0)

    def _num_seen(self, chunk: Chunk) -> int:
        """Tokens told from the chunk's beginning on; less than none where tokens before it were not."""
        seen = self.next_index - chunk.index
        if seen < 0 or chunk.place is None or self._has_hole:
            return seen
        return self._told[chunk.choice].tokens - chunk.place

    def _skip_to(self, chunk: Chunk) -> None:
        """The log lost its beginning (it expired): go on with what there is."""
        self._has_hole = True
        self.next_index = max(self.next_index, chunk.index)

    def _accept_end(self, chunk: Chunk) -> list[Chunk]:
        if chunk.choice in self._ended or (chunk.place is None and chunk.index < self.next_index):
            return []
        self._ended.add(chunk.choice)
        self._told[chunk.choice].chars += len(chunk.text)
        return [self._at_cursor(chunk)] if self.next_index >= self._silent_until else []

    def _at_cursor(self, chunk: Chunk) -> Chunk:
        return chunk if chunk.index == self.next_index else msgspec.structs.replace(chunk, index=self.next_index)

    def _unseen(self, chunk: Chunk, seen: int) -> Chunk:
        """The rest of a chunk that begins before the cursor (after the server lost its last moments, chunks may be cut
        anew), or before where the subscriber begins (a checkpoint holds many tokens).
        """
        start = max(self.next_index, self._silent_until)
        skipped = seen + start - self.next_index
        if not 0 < skipped < len(chunk.token_ids):
            return self._at_cursor(chunk)
        if len(chunk.text_ends) == len(chunk.token_ids):
            told = chunk.text_ends[skipped - 1]
        elif skipped == seen and (known := self._boundary(chunk, seen)) is not None:
            told = self._told[chunk.choice].chars - known
        else:
            return chunk
        return Chunk(
            job_id=chunk.job_id,
            index=start,
            token_ids=chunk.token_ids[skipped:],
            text=chunk.text[told:],
            choice=chunk.choice,
            logprobs=chunk.logprobs[skipped:] if chunk.logprobs else None,
            finish_reason=chunk.finish_reason,
            attempt=chunk.attempt,
            text_ends=tuple(end - told for end in chunk.text_ends[skipped:]),
            place=None if chunk.place is None else chunk.place + skipped,
        )

    def _boundary(self, chunk: Chunk, seen: int) -> int | None:
        told = self._told[chunk.choice]
        return told.marks.get(told.tokens - seen)

    def _advance(self, chunk: Chunk, seen: int) -> None:
        told, num_tokens = self._told[chunk.choice], len(chunk.token_ids)
        place = told.tokens - seen
        known = chunk.text_ends[seen - 1] if 0 < seen <= len(chunk.text_ends) else 0
        told.chars = told.marks.setdefault(place, told.chars - known) + len(chunk.text)
        told.tokens = place + num_tokens
        self.next_index += num_tokens - seen
        if chunk.finish_reason is not None:
            self._ended.add(chunk.choice)


def _as_told(result: JobResult) -> Iterator[tuple[int, ChoiceResult]]:
    """(token's place in its choice, the choice) in the order of the log; by turns where the result does not say."""
    choices = {choice.index: choice for choice in result.choices}
    places = dict.fromkeys(choices, 0)
    for index in result.order:
        choice = choices.get(index)
        if choice is not None and places[index] < len(choice.token_ids):
            yield places[index], choice
            places[index] += 1
    for place, choice in _by_turns(result.choices):
        if place >= places[choice.index]:
            yield place, choice


def _by_turns(choices: tuple[ChoiceResult, ...]) -> Iterator[tuple[int, ChoiceResult]]:
    """(token's place in its choice, the choice): the choices' tokens side by side, as they were made."""
    longest = max((len(choice.token_ids) for choice in choices), default=0)
    for index in range(longest):
        for choice in choices:
            if index < len(choice.token_ids):
                yield index, choice
