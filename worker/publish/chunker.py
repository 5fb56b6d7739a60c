"""Cuts a job's answer into chunks: one per token while streaming (or a few of a lone choice, where so set, or where
the log is behind), a checkpoint of many otherwise.

A chunk is kept until the log has it, so that a repeated append sends the same bytes; later chunks are
made again from the answer when the log turns out to be shorter than believed. It knows no Redis and no
engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice

from schemas.chunk import Chunk
from worker.jobs import Admitted, Append
from worker.text.answer import Choice

CHECKPOINT_TOKENS = 32
MOST_TOGETHER = 16  # tokens in a chunk of a stream whose log is behind


class Chunker:
    """How far one running job's answer is logged, and the chunks from there on.

    0 ──── logged ──── made into chunks ──── answer.num_tokens
                       (unconfirmed)
    """

    __slots__ = (
        "_answer", "_attempt", "_ended", "_fixed", "_is_plain", "_job_id", "_lone", "_made", "_per_chunk", "_positions",
        "_row", "_streams", "_tells_each", "_tells_ends", "_token", "_unconfirmed",
    )  # fmt: skip

    def __init__(self, job: Admitted, checkpoint_tokens: int = CHECKPOINT_TOKENS, chunk_tokens: int = 1) -> None:
        self._answer = job.answer
        self._job_id, self._token, self._attempt = job.job_id, job.delivery.token, job.delivery.attempt
        self._streams = job.request.stream
        num_choices = len(job.answer.choices)
        if self._streams:
            self._per_chunk = max(1, chunk_tokens) if num_choices == 1 else 1
        else:
            self._per_chunk = max(1, checkpoint_tokens)
        self._row = 0 if self._streams or num_choices == 1 else max(1, self._per_chunk // num_choices)
        self._tells_ends = self._streams and num_choices > 1
        self._lone = job.answer.choices[0] if self._streams and num_choices == 1 else None
        self._tells_each = self._lone is not None and self._per_chunk == 1  # token at once
        lone = self._lone if self._tells_each else None
        self._is_plain = lone is not None and lone.logprobs is None and not lone.stream.has_stops
        self._unconfirmed: deque[Append] = deque()
        self._made = 0
        self._fixed = 0  # the order of so many tokens may have been told: it stays, also when the log is shorter
        self._positions = [0] * num_choices  # tokens of each choice among those made into chunks
        self._ended: set[int] = set()  # choices whose end a chunk tells
        self.seek(job.answer.num_tokens)  # what is there already was read from the log

    @property
    def num_unlogged(self) -> int:
        """Tokens."""
        logged = self._unconfirmed[0].chunk.index if self._unconfirmed else self._made
        return self._answer.num_tokens - logged

    @property
    def num_waiting(self) -> int:
        """Tokens that are in no chunk yet."""
        return self._answer.num_tokens - self._made

    @property
    def is_due(self) -> bool:
        """Is there something to append? A chunk of several tokens waits until it is full, but not at the beginning of
        a stream, and not at an end. An answer that is told to nobody needs no log at its end: the result replaces it.
        """
        if self._tells_each:  # as a rule
            return len(self._answer.order) > self._made or bool(self._unconfirmed)
        if not self._streams and self._answer.is_finished:
            return False
        if self._unconfirmed:
            return True
        if self._row:
            return self._made < self._fixed or self._next_row(self._positions) is not None
        waiting = len(self._answer.order) - self._made
        if waiting >= self._per_chunk:
            return True
        if waiting and (self._answer.is_finished or (self._streams and not self._made)):
            return True
        return self._tells_ends and self._has_untold_end()

    def pass_on(self, token_id: int) -> Append | None:
        """Adds the next token to the answer and makes its chunk at once, where nothing else is to be asked: a plain
        stream that has begun, has not ended, and has nothing on its way. None where it is not, and nothing is done.
        The chunk counts as logged unless it comes back by `keep`.
        """
        answer, lone, index = self._answer, self._lone, self._made
        if not self._is_plain or self._unconfirmed or not index or index != len(answer.order):
            return None
        if lone is None or lone.finish_reason is not None:
            return None
        text = lone.stream.push(token_id)
        answer.order.append(0)
        return Append(self._token, self._make_next(token_id, text))

    def keep(self, append: Append) -> None:
        """It is not known that the log has what `pass_on` made."""
        self._unconfirmed.append(append)

    def take_back(self) -> None:
        """The chunk that `pass_on` made is not sent: its token goes with those that have come since."""
        self._made -= 1
        self._positions[0] = self._made

    def appends(self, limit: int, together: bool = False) -> list[Append]:
        """The next chunks, at most `limit`; `confirm` tells that the first of them is logged. `together`: the log is
        behind, so tokens of one choice that wait share chunks of up to MOST_TOGETHER: it has fewer to write, and
        catches up. Several choices keep the order of their steps: another worker makes it again as a rule, and who was
        told what the server lost may come back with no more than the number of tokens that he has.
        """
        unconfirmed = self._unconfirmed
        lone = self._lone
        if lone is not None and not unconfirmed and self._made + 1 == len(self._answer.order):  # as a rule
            if lone.finish_reason is None and lone.logprobs is None and self._made:
                append = Append(self._token, self._make_next(lone.stream.token_ids[-1], lone.stream.pieces[-1]))
            else:
                append = self._append(self._make(self._made, self._made + 1))
            unconfirmed.append(append)
            return [append]
        most = max(self._per_chunk, MOST_TOGETHER) if together and self._streams else self._per_chunk
        ready = self._arrange() if self._row else self._answer.num_tokens
        while len(unconfirmed) < limit and self._made < ready:
            unconfirmed.append(self._append(self._make(self._made, self._next_end(most, ready))))
        if self._tells_ends and self._made == self._answer.num_tokens:
            for choice in self._untold_ends():
                unconfirmed.append(self._append(self._make_end(choice)))
        return list(islice(unconfirmed, limit))

    def _append(self, chunk: Chunk) -> Append:
        return Append(self._token, chunk, checkpoint=not self._streams)

    def _has_untold_end(self) -> bool:
        return any(
            choice.finish_reason is not None and index not in self._ended
            for index, choice in enumerate(self._answer.choices)
        )

    def _untold_ends(self) -> list[int]:
        """Choices that ended without a token, where the job goes on; a lone choice's end is the job's own."""
        return [
            index
            for index, choice in enumerate(self._answer.choices)
            if choice.finish_reason is not None
            and index not in self._ended
            and (self._positions[index] == choice.num_tokens)
        ]

    def confirm(self) -> None:
        self._unconfirmed.popleft()

    def seek(self, index: int) -> None:
        """The log ends at this index; everything after it is to be sent (again)."""
        self._unconfirmed.clear()
        self._made = max(0, min(index, self._answer.num_tokens))
        self._fixed = max(self._fixed, self._made)
        self._positions = [0] * len(self._positions)
        for choice in islice(self._answer.order, self._made):
            self._positions[choice] += 1
        self._ended = {index for index, c in enumerate(self._answer.choices) if self._is_told(index, c)}

    def _is_told(self, index: int, choice: Choice) -> bool:
        """Is every token of an ended choice in the log? Then its end is there, or told by the job's."""
        return choice.finish_reason is not None and self._positions[index] == choice.num_tokens

    def _arrange(self) -> int:
        """Puts what nobody was told yet in rows: several tokens of one choice, then as many of the next. Any worker
        makes the same rows, however the tokens came. Returns where the last whole row ends.
        """
        order, at = self._answer.order, self._positions.copy()
        for index in islice(order, self._made, self._fixed):
            at[index] += 1
        del order[self._fixed :]
        while (row := self._next_row(at)) is not None:
            index, num_tokens = row
            order += [index] * num_tokens
            at[index] += num_tokens
        ready = len(order)
        for index, choice in enumerate(self._answer.choices):
            order += [index] * (choice.num_tokens - at[index])
        return ready

    def _next_row(self, at: Sequence[int]) -> tuple[int, int] | None:
        """Whose turn it is after so many tokens of each choice, and how many its row has; None while it has gaps."""
        row, choices = self._row, self._answer.choices
        open_rows = [
            (at[index] // row, index)
            for index, choice in enumerate(choices)
            if choice.finish_reason is None or at[index] < choice.num_tokens
        ]
        if not open_rows:
            return None
        number, index = min(open_rows)
        choice, border = choices[index], (number + 1) * row
        if choice.num_tokens < border and choice.finish_reason is None:
            return None
        return index, min(border, choice.num_tokens) - at[index]

    def _next_end(self, most: int, ready: int) -> int:
        """Where the next chunk ends: a run of one choice, of at most so many tokens."""
        order, start = self._answer.order, self._made
        end, last = start + 1, min(ready, start + most)
        while end < last and order[end] == order[start]:
            end += 1
        return end

    def _make(self, index: int, end: int) -> Chunk:
        choice_index = self._answer.order[index]
        choice = self._answer.choices[choice_index]
        start = self._positions[choice_index]
        stop = start + end - index
        self._positions[choice_index] = stop
        self._made = end
        self._fixed = max(self._fixed, end)
        finish_reason = choice.finish_reason if stop == choice.num_tokens else None
        if finish_reason is not None:
            self._ended.add(choice_index)
        pieces = choice.stream.pieces[start:stop]
        return Chunk(
            job_id=self._job_id,
            index=index,
            token_ids=tuple(choice.stream.token_ids[start:stop]),
            text="".join(pieces),
            text_ends=tuple(accumulate(map(len, pieces))) if len(pieces) > 1 else (),
            choice=choice_index,
            logprobs=None if choice.logprobs is None else tuple(choice.logprobs[start:stop]),
            finish_reason=finish_reason,
            attempt=self._attempt,
            usage=self._answer.usage_at_start() if index == 0 else None,
            place=start if len(self._positions) > 1 else None,
        )

    def _make_next(self, token_id: int, text: str) -> Chunk:
        """As `_make`, of the newest token of a lone choice that goes on."""
        index = self._made
        self._made = self._positions[0] = index + 1
        return Chunk(job_id=self._job_id, index=index, token_ids=(token_id,), text=text, attempt=self._attempt)

    def _make_end(self, choice_index: int) -> Chunk:
        choice = self._answer.choices[choice_index]
        self._ended.add(choice_index)
        return Chunk(
            job_id=self._job_id,
            index=self._made,
            text=choice.stream.rest,
            choice=choice_index,
            finish_reason=choice.finish_reason,
            attempt=self._attempt,
            place=self._positions[choice_index],
        )
