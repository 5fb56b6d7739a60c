"""Tracks which tokens of a job a subscriber has; turns log entries, messages and results into
chunks that it has not received, each exactly once and in order.

It keeps one number per choice. Its caller reads the log when a message leaves a gap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from tokenmill.errors import ConfigurationError
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.result import ChoiceResult, JobResult, ToolCallDelta
from tokenmill_schemas.validation import MAX_CHOICES

_POSITION = re.compile(rf"[0-9]{{1,15}}e?(?:\.[0-9]{{1,15}}e?){{0,{MAX_CHOICES - 1}}}", re.ASCII)
_ENDED = "e"  # in a position, marks a choice whose end was delivered


class StreamPosition:
    """The position of a subscriber in a job's answer.

    `starting_after` is the position of the last chunk that the subscriber has; with one choice, a
    number of tokens also works. Raises ConfigurationError for any other value.
    """

    __slots__ = ("_ended", "_has", "_is_number", "_num_choices", "is_over", "job_id")

    def __init__(self, job_id: str, starting_after: str | int = 0) -> None:
        self.job_id = job_id
        self.is_over = False
        self._has, self._ended = read_position(starting_after)
        self._num_choices = len(self._has)  # as known so far
        self._is_number = self._num_choices == 1 and self._has[0] > 0

    @property
    def has(self) -> dict[int, int]:
        """The number of tokens that the subscriber has, of each choice."""
        return dict(enumerate(self._has))

    @property
    def num_tokens(self) -> int:
        return sum(self._has)

    @property
    def log_start(self) -> str:
        """The id of the log entry to read from.

        The log of several choices is read from its beginning: the ids of its entries count the
        tokens of all choices together, in the order in which the job's present worker wrote them.
        """
        return f"{self._has[0]}-0" if self._has[0] and self._num_choices == 1 else "-"

    def accept(self, chunk: Chunk) -> list[Chunk] | None:
        """Return the chunks to deliver for a chunk that was received.

        Returns an empty list if the subscriber has it already, and None if a chunk before it is
        missing.
        """
        has = self._has
        # the usual case
        if (
            chunk.index == has[0]
            and chunk.status is None
            and chunk.token_ids
            and not (chunk.choice or self.is_over)
            and chunk.n == self._num_choices == 1
        ):
            has[0] += len(chunk.token_ids)
            return [chunk]
        if self.is_over or not 0 <= chunk.choice < MAX_CHOICES:
            return []
        self._expect(max(chunk.n, chunk.choice + 1))
        if chunk.is_last:
            if self._lacks_something(chunk):
                return None
            self.is_over = True
            return [self._placed(chunk)]
        return self._accept(chunk)

    def accept_log(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the new chunks of a page of the log. Stop at a gap: the log is being written again,
        or the result has the missing tokens.
        """
        for chunk in chunks:
            delivered = self.accept(chunk)
            if delivered is None:
                return
            yield from delivered

    def accept_result(self, result: JobResult) -> Iterator[Chunk]:
        """Yield the rest of an answer whose log was deleted: one chunk per token, then the last
        chunk. Several choices come one after the other, each with a chunk of its own for its end.
        """
        if self.is_over:
            return
        choices = [choice for choice in result.choices if 0 <= choice.index < MAX_CHOICES]
        self._expect(max((choice.index + 1 for choice in choices), default=1))
        for choice in choices:
            yield from self._from_result(result, choice)
        self.is_over = True
        last = Chunk(
            job_id=self.job_id,
            index=self._has[0],
            text=self._rest(choices[0]) if len(choices) == 1 and self._num_choices == 1 else "",
            reasoning=self._reasoning_rest(choices[0])
            if len(choices) == 1 and self._num_choices == 1
            else "",
            finish_reason=result.finish_reason,
            attempt=result.attempt,
            status=result.status,
            usage=result.usage,
            error=result.error,
            n=self._num_choices,
        )
        yield self._placed(last)

    def _from_result(self, result: JobResult, choice: ChoiceResult) -> Iterator[Chunk]:
        first, which = self._has[choice.index], choice.index
        tokens = range(first, len(choice.token_ids) + 1)
        texts = _pieces(choice.text, choice.text_ends, tokens)
        thoughts = _pieces(choice.reasoning, choice.reasoning_ends, tokens)
        calls = _by_token(choice)
        for index, (text, thought) in enumerate(zip(texts, thoughts, strict=True), first):
            self._has[which] = index + 1
            chunk = Chunk(
                job_id=self.job_id,
                index=index,
                choice=which,
                token_ids=(choice.token_ids[index],),
                text=text,
                reasoning=thought,
                tool_calls=calls.get(index, ()),
                logprobs=choice.logprobs[index : index + 1] if choice.logprobs else None,
                prompt=None if index or which else result.prompt,
                attempt=result.attempt,
                n=self._num_choices,
            )
            yield self._placed(chunk)
        if self._num_choices > 1 and which not in self._ended:
            self._ended.add(which)
            end_chunk = Chunk(
                job_id=self.job_id,
                index=self._has[which],
                choice=which,
                text=self._rest(choice),
                reasoning=self._reasoning_rest(choice),
                finish_reason=choice.finish_reason,
                attempt=result.attempt,
                n=self._num_choices,
            )
            yield self._placed(end_chunk)

    def _rest(self, choice: ChoiceResult) -> str:
        """Return the text after a choice's last token; "" if the subscriber has more tokens than
        the choice.
        """
        if self._has[choice.index] > len(choice.token_ids):
            return ""
        return choice.text[choice.text_ends[-1] if choice.text_ends else 0 :]

    def _reasoning_rest(self, choice: ChoiceResult) -> str:
        """Return the text of thoughts after a choice's last token; see `_rest`."""
        if self._has[choice.index] > len(choice.token_ids):
            return ""
        return choice.reasoning[choice.reasoning_ends[-1] if choice.reasoning_ends else 0 :]

    def _lacks_something(self, last: Chunk) -> bool:
        """Return whether chunks before the last one are missing. With one choice, the last chunk
        has the number of tokens; with several, each choice must have ended.
        """
        if self._num_choices == 1:
            return last.index > self._has[0]
        return len(self._ended) < self._num_choices

    def _expect(self, num_choices: int) -> None:
        """Extend the position to this number of choices or more."""
        missing = min(num_choices, MAX_CHOICES) - self._num_choices
        if missing <= 0:
            return
        if self._is_number:
            raise ConfigurationError(
                f"job {self.job_id} has several choices: "
                "starting_after must be the position of a chunk, "
                f"not the number {self._has[0]}"
            )
        self._has += [0] * missing
        self._num_choices += missing

    def _accept(self, chunk: Chunk) -> list[Chunk] | None:
        choice = chunk.choice
        seen = self._has[choice] - chunk.index
        if seen < 0:
            return None
        if not chunk.token_ids:
            if choice in self._ended:
                return []
        elif seen >= len(chunk.token_ids):
            return []
        elif seen:
            chunk = _without(chunk, seen)
        self._has[choice] = max(self._has[choice], chunk.end)
        if chunk.finish_reason is not None:
            self._ended.add(choice)
        return [self._placed(chunk)]

    def _placed(self, chunk: Chunk) -> Chunk:
        """Return the chunk with the subscriber's position after it, if the job has several choices;
        with one, its index is enough.
        """
        if self._num_choices == 1:
            return chunk
        ended = self._ended
        after = ".".join(
            f"{has}{_ENDED}" if i in ended else str(has) for i, has in enumerate(self._has)
        )
        return msgspec.structs.replace(chunk, after=after)


def read_position(value: str | int) -> tuple[list[int], set[int]]:
    """Return the tokens of each choice, and the choices whose end was delivered. Raises
    ConfigurationError.
    """
    text = str(value)
    if not isinstance(value, str | int) or isinstance(value, bool) or not _POSITION.fullmatch(text):
        raise ConfigurationError(
            f"starting_after is the position of a chunk, or a number of tokens, not {value!r}"
        )
    parts = text.split(".")
    ended = {i for i, part in enumerate(parts) if part.endswith(_ENDED)}
    return [int(part.removesuffix(_ENDED)) for part in parts], ended


def _by_token(choice: ChoiceResult) -> dict[int, tuple[ToolCallDelta, ...]]:
    """Return the pieces of calls by their token, each as a chunk of one token has it."""
    found: dict[int, tuple[ToolCallDelta, ...]] = {}
    for delta in choice.call_deltas:
        own = msgspec.structs.replace(delta, token=0)
        found[delta.token] = (*found.get(delta.token, ()), own)
    return found


def _pieces(text: str, ends: tuple[int, ...], tokens: range) -> Iterator[str]:
    """Yield the part of a text that belongs to each of the tokens; `ends` may leave out the last
    ones, whose part is empty.
    """
    borders = (0, *ends)
    for start, end in pairwise(borders[min(i, len(borders) - 1)] for i in tokens):
        yield text[start:end]


def _without(chunk: Chunk, seen: int) -> Chunk:
    """Return the chunk without its first `seen` tokens. A subscriber may start inside a chunk, and
    chunks may have other borders after the server lost its last writes.
    """
    delivered = chunk.text_ends[seen - 1] if seen <= len(chunk.text_ends) else 0
    thought = chunk.reasoning_ends[seen - 1] if seen <= len(chunk.reasoning_ends) else 0
    return msgspec.structs.replace(
        chunk,
        index=chunk.index + seen,
        token_ids=chunk.token_ids[seen:],
        text=chunk.text[delivered:],
        logprobs=chunk.logprobs[seen:] if chunk.logprobs else None,
        text_ends=tuple(end - delivered for end in chunk.text_ends[seen:]),
        tool_calls=tuple(
            msgspec.structs.replace(delta, token=delta.token - seen)
            for delta in chunk.tool_calls
            if delta.token >= seen
        ),
        reasoning=chunk.reasoning[thought:],
        reasoning_ends=tuple(end - thought for end in chunk.reasoning_ends[seen:]),
        prompt=None,
    )
