"""Orders lines so that those with the same beginning run one after the other, while its keys and
values are in the worker's prefix cache.

A fingerprint is the digests of a request's leading text at several lengths: no tokenizer is needed.
It only orders. If two texts have the same digest, or one text has different ones, lines run in
another order, and every answer is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Final, Protocol, TypeVar

import msgspec

from tokenmill_schemas.job import JobRequest

_SHORTEST: Final = 128  # bytes: about a block of the cache
_NUM_LENGTHS: Final = 33  # four a doubling: what two texts share is missed by a sixth of it at most
LENGTHS: Final = tuple(round(_SHORTEST * 2 ** (step / 4)) for step in range(_NUM_LENGTHS))
_WORTH: Final = LENGTHS.index(1_024) + 1  # lengths: shared by lines that should have one worker
_DIGEST_BYTES: Final = 8
_encode: Final = msgspec.json.Encoder().encode


def fingerprint(job: JobRequest) -> tuple[bytes, ...]:
    """Return the digest of the first `LENGTHS` bytes of the leading text, as far as it has them."""
    text, begin, digests = leading_text(job), 0, []
    digest = hashlib.blake2b(job.model.encode(), digest_size=_DIGEST_BYTES)
    for end in LENGTHS:
        if end > len(text):
            break
        digest.update(text[begin:end])
        digests.append(digest.digest())
        begin = end
    return tuple(digests)


def leading_text(job: JobRequest) -> bytes:
    """Return what a request begins with, in the order of a chat template: instructions, tools,
    documents, variables of the template, and the other messages.
    """
    if job.messages is None:
        given = job.prompt if job.prompt is not None else (job.prompt_ids or ())[: LENGTHS[-1]]
        return _encode(given)
    rest = len(job.messages)
    for place, message in enumerate(job.messages):
        if message.role not in ("system", "developer"):
            rest = place
            break
    parts = (job.messages[:rest], job.tools, job.documents, job.chat_template_kwargs)
    return b"".join(map(_encode, (*parts, job.messages[rest:])))


class _Fingerprinted(Protocol):
    @property
    def line(self) -> int: ...

    @property
    def digests(self) -> tuple[bytes, ...]: ...


Read = TypeVar("Read", bound=_Fingerprinted)


def in_prefix_order(lines: Sequence[Read]) -> list[Read]:
    """Return lines, given in the order of their file, so that those with the same digest stand
    together, where the first of them stands; among them those with the same digest of a greater
    length. All others keep their order.
    """
    first: dict[bytes, int] = {}  # by digest, the number of the first line that has it

    def key(read: Read) -> tuple[int, ...]:
        return (*(first.setdefault(digest, read.line) for digest in read.digests), read.line)

    return sorted(lines, key=key)


def shared_beginnings(lines: Sequence[Read]) -> list[bytes]:
    """Return for each of these lines, in their prefix order, the digest of the longest beginning
    that it shares with a line beside it; empty where that is shorter than a kilobyte.
    """
    shared = [0, *(_num_shared(one.digests, next_.digests) for one, next_ in pairwise(lines)), 0]
    longest = (max(beside) for beside in pairwise(shared))
    return [
        read.digests[most - 1] if most >= _WORTH else b""
        for read, most in zip(lines, longest, strict=True)
    ]


def _num_shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
