"""Cuts a job's answer into chunks. A stream gets one chunk per token, or one per few tokens if n is
1 and the settings ask for it, or if the log is behind. Other jobs get a checkpoint of many tokens.

A chunk is kept until the log has it, so that a repeated append sends the same bytes. Later chunks
are made again from the answer when the log turns out to be shorter than believed. The chunker uses
neither Redis nor the engine.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, islice

from tokenmill_schemas.chunk import Chunk
from tokenmill_worker.jobs import AdmittedJob, ChunkAppend
from tokenmill_worker.text.job_output import deltas_of

CHECKPOINT_TOKENS = 32
MOST_TOGETHER = 16  # tokens in a chunk of a stream whose log is behind
MAX_PLACE = 2**31


class Chunker:
    """Tracks how much of one running job's answer is logged, and makes the chunks from there on.

    Tokens of each choice:

        0 ──── logged ──── made into chunks ──── num_tokens
                           (unconfirmed)
    """

    __slots__ = (
        "_answer",
        "_attempt",
        "_ended",
        "_is_plain",
        "_job_id",
        "_lone",
        "_made",
        "_num_choices",
        "_one_per_token",
        "_per_chunk",
        "_place",
        "_streams",
        "_token",
        "_unconfirmed",
    )  # fmt: skip

    def __init__(
        self, job: AdmittedJob, checkpoint_tokens: int = CHECKPOINT_TOKENS, chunk_tokens: int = 1
    ) -> None:
        """Start behind the tokens that the answer has already: they were read from the log."""
        answer = self._answer = job.answer
        self._job_id, self._token, self._attempt = (
            job.job_id,
            job.delivery.token,
            job.delivery.attempt,
        )
        self._streams = job.request.stream
        self._num_choices = len(answer.choices)
        is_lone = self._num_choices == 1
        if self._streams:
            self._per_chunk = max(1, chunk_tokens) if is_lone else 1
        else:
            self._per_chunk = max(1, checkpoint_tokens // self._num_choices)
        self._lone = answer.choices[0] if self._streams and is_lone else None
        self._one_per_token = self._lone is not None and self._per_chunk == 1  # one token per chunk
        lone = self._lone if self._one_per_token else None
        self._is_plain = (
            lone is not None
            and lone.logprobs is None
            and lone.stream.is_plain
            and not lone.stream.has_stops
        )
        self._unconfirmed: deque[ChunkAppend] = deque()
        self._made = [choice.num_tokens for choice in answer.choices]  # of each choice
        # The last chunk's number in the log.
        self._place = self._made[0] if is_lone else job.delivery.log_end
        self._ended = set(answer.ended_choices)
        # no worker wrote the log's last entry
        if not is_lone and not 0 <= self._place <= MAX_PLACE:
            self.seek(0)

    @property
    def num_unlogged(self) -> int:
        """The number of tokens that the log is not known to have."""
        return self.num_waiting + sum(len(append.chunk.token_ids) for append in self._unconfirmed)

    @property
    def num_waiting(self) -> int:
        """The number of tokens that are in no chunk yet."""
        return self._answer.num_tokens - sum(self._made)

    @property
    def is_due(self) -> bool:
        """Return whether there is something to append. A chunk of several tokens waits until it is
        full, except at the beginning of a stream and at an end. A job that does not stream needs no
        log at its end: the result replaces it.
        """
        if self._one_per_token:  # the usual case
            return self._answer.choices[0].num_tokens > self._place or bool(self._unconfirmed)
        if not self._streams and self._answer.is_finished:
            return False
        return bool(self._unconfirmed) or any(
            self._is_choice_due(index) for index in range(self._num_choices)
        )

    def _is_choice_due(self, index: int) -> bool:
        choice = self._answer.choices[index]
        waiting = choice.num_tokens - self._made[index]
        if waiting >= self._per_chunk or self._has_undelivered_end(index):
            return True
        return waiting > 0 and (
            choice.finish_reason is not None or (self._streams and not self._made[index])
        )

    def _has_undelivered_end(self, index: int) -> bool:
        """Return whether the choice ended without a token and its end needs a chunk. The end of a
        lone choice is the job's own.
        """
        choice = self._answer.choices[index]
        if not self._streams or self._num_choices == 1 or index in self._ended:
            return False
        return choice.finish_reason is not None and self._made[index] == choice.num_tokens

    def fast_chunk(self, token_id: int) -> ChunkAppend | None:
        """Add the next token to the answer and return its chunk, if nothing else has to be checked:
        the job is a plain stream that has begun, has not ended, and has no unconfirmed chunk. Else
        return None and change nothing. The chunk counts as logged unless `requeue` returns it.
        """
        lone, index = self._lone, self._place
        if (
            not self._is_plain
            or self._unconfirmed
            or not index
            or lone is None
            or lone.finish_reason is not None
        ):
            return None
        stream = lone.stream
        if index != len(stream.token_ids):
            return None
        return self._make_next(token_id, stream.push(token_id))

    def requeue(self, append: ChunkAppend) -> None:
        """Keep a chunk of `fast_chunk`, because the log is not known to have it."""
        self._unconfirmed.append(append)

    def withdraw(self) -> None:
        """Undo the chunk of `fast_chunk` before it is sent: its token is sent with the tokens that
        have come since.
        """
        self._place -= 1
        self._made[0] = self._place

    def appends(self, limit: int, together: bool = False) -> list[ChunkAppend]:
        """Return the next chunks, at most `limit`. `confirm` must be called once for each that is
        logged, in order. `together`: the log is behind, so waiting tokens of one choice share
        chunks of up to MOST_TOGETHER, and the log catches up with fewer writes. If that many tokens
        wait, they share chunks in any case.
        """
        unconfirmed = self._unconfirmed
        lone = self._lone
        if lone is not None and not unconfirmed and self._place + 1 == lone.num_tokens:  # usual
            if (
                lone.finish_reason is None
                and lone.logprobs is None
                and self._place
                and lone.stream.is_plain
            ):
                append = self._make_next(lone.stream.token_ids[-1], lone.stream.pieces[-1])
            else:
                append = self._make(0, 1)
            unconfirmed.append(append)
            return [append]
        for index in range(self._num_choices):
            while len(unconfirmed) < limit and (num_tokens := self._num_next(index, together)):
                unconfirmed.append(self._make(index, num_tokens))
            if len(unconfirmed) < limit and self._has_undelivered_end(index):
                unconfirmed.append(self._make(index, 0))
        return list(islice(unconfirmed, limit))

    def _num_next(self, index: int, together: bool) -> int:
        """Return how many tokens the choice's next chunk takes. A checkpoint is full, except the
        last one of a choice.
        """
        choice = self._answer.choices[index]
        waiting, most = choice.num_tokens - self._made[index], self._per_chunk
        if not self._streams:
            return min(waiting, most) if waiting >= most or choice.finish_reason is not None else 0
        if together or waiting >= MOST_TOGETHER:
            most = max(most, MOST_TOGETHER)
        return min(waiting, most)

    def confirm(self) -> None:
        self._unconfirmed.popleft()

    def seek(self, end: int) -> None:
        """Continue behind the log's entry of number `end`: what follows is sent again. With several
        choices the number does not determine which tokens the log has, so the log is rewritten from
        its beginning.
        """
        self._unconfirmed.clear()
        self._ended.clear()
        if self._num_choices == 1:
            self._place = self._made[0] = max(0, min(end, self._answer.num_tokens))
        else:
            self._place, self._made = 0, [0] * self._num_choices

    def _make(self, choice_index: int, num_tokens: int) -> ChunkAppend:
        """Make the choice's next chunk; without tokens it carries the choice's end."""
        choice = self._answer.choices[choice_index]
        start = self._made[choice_index]
        stop = self._made[choice_index] = start + num_tokens
        pieces, logprobs = choice.stream.pieces[start:stop], choice.logprobs
        thoughts = choice.stream.reasoning_pieces[start:stop]
        finish_reason = choice.finish_reason if stop == choice.num_tokens else None
        if (
            finish_reason is not None
            and num_tokens
            and (choice.stream.rest or choice.stream.reasoning_rest)
            and self._num_choices > 1
        ):
            finish_reason = None  # the next chunk carries the end and the rest of the text
        if finish_reason is not None:
            self._ended.add(choice_index)
        chunk = Chunk(
            job_id=self._job_id,
            index=start,
            token_ids=tuple(choice.stream.token_ids[start:stop]),
            text="".join(pieces) if num_tokens else choice.stream.rest,
            text_ends=tuple(accumulate(map(len, pieces))) if len(pieces) > 1 else (),
            reasoning="".join(thoughts) if num_tokens else choice.stream.reasoning_rest,
            reasoning_ends=tuple(accumulate(map(len, thoughts)))
            if len(thoughts) > 1 and any(thoughts)
            else (),
            tool_calls=deltas_of(choice.stream.call_pieces[start:stop]),
            choice=choice_index,
            logprobs=tuple(logprobs[start:stop]) if num_tokens and logprobs is not None else None,
            finish_reason=finish_reason,
            attempt=self._attempt,
            usage=None if self._place else self._answer.usage_at_start(),
            n=self._num_choices,
            params=None if self._place else self._answer.params,
            prompt=None if start or choice_index or not num_tokens else self._answer.prompt,
        )
        append = ChunkAppend(self._token, chunk, self._place, not self._streams)
        self._place = append.end
        return append

    def _make_next(self, token_id: int, text: str) -> ChunkAppend:
        """Make the chunk of the newest token of a lone choice that has not ended; the fast form of
        `_make`.
        """
        index = self._place
        self._place = self._made[0] = index + 1
        chunk = Chunk(
            job_id=self._job_id,
            index=index,
            token_ids=(token_id,),
            text=text,
            attempt=self._attempt,
        )
        return ChunkAppend(self._token, chunk, index)
