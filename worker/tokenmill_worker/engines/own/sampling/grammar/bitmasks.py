"""Bit masks of tokens: read, written, and applied to logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tokenmill_worker.engines.own.sampling.transfer import to_device


@dataclass(frozen=True, slots=True)
class Masks:
    """Bit masks of the rows that have a grammar: bit t of a row's words allows token t, for t below
    `width`.
    """

    rows: tuple[int, ...] = ()
    words: Tensor | None = None  # [len(rows), words] int32, on the host
    width: int = 0
    errors: dict[int, str] = field(default_factory=dict)  # by item
    complete: frozenset[int] = frozenset()  # rows whose grammar allows nothing but the end

    def leaves_others(self, row: int, token_ids: Iterable[int]) -> bool:
        """Return whether a row may draw another token than these."""
        words = self._of(row)
        return words is None or not is_only(words, [i for i in token_ids if i < self.width])

    def allows_one(self, row: int, token_ids: Iterable[int]) -> bool:
        """Return whether a row may draw one of these tokens."""
        words = self._of(row)
        return words is None or any(
            int(words[i // 32]) >> (i % 32) & 1 for i in token_ids if i < self.width
        )

    def _of(self, row: int) -> Tensor | None:
        if row not in self.rows or self.words is None:
            return None
        return self.words[self.rows.index(row)]

    def apply(self, logits: Tensor) -> None:
        """Exclude, in place, every token that the masks do not allow."""
        if not self.rows or self.words is None:
            return
        width = min(self.width, logits.shape[1])
        is_whole = len(self.rows) == logits.shape[0]
        at = None if is_whole else to_device(np.array(self.rows, np.int64), logits.device)
        if logits.device.type == "cpu":
            _apply_on_cpu(self.words, logits, at, width)
            return
        refused = _zero_bits(self.words, logits.device)[:, :width]
        part = logits if at is None else logits[at]
        part[:, width:] = -torch.inf  # ids that the tokenizer does not have
        part[:, :width].masked_fill_(refused, -torch.inf)
        if at is not None:
            logits[at] = part


def allow_only(words: Tensor, token_ids: list[int]) -> None:
    """Make one row's mask allow these tokens and no others."""
    words.zero_()
    view = words.numpy().view(np.uint32)
    for token_id in token_ids:
        view[token_id // 32] |= np.uint32(1 << (token_id % 32))


def open_masks(count: int, vocab_size: int) -> Tensor:
    """Return masks [count, words] that allow every token."""
    import xgrammar

    masks: Tensor = xgrammar.allocate_token_bitmask(count, vocab_size)
    return masks


def num_places(words: Tensor) -> int:
    """Return how many words of one row's mask allow any token."""
    return int(np.count_nonzero(words.numpy()))


def allowed_ids(words: Tensor, first_places: int | None = None) -> list[int]:
    """Return the tokens that one row's mask allows; with `first_places`, those of so many words
    that allow any.
    """
    view = words.numpy().view(np.uint32)
    places = np.flatnonzero(view)[:first_places]
    bits = np.unpackbits(view[places].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, columns = np.nonzero(bits)
    found: list[int] = (places[rows] * 32 + columns).tolist()
    return found


def each_allowed(words: Tensor) -> Iterator[int]:
    """Yield the tokens that one row's mask allows, in the order of their ids; for a caller who
    mostly needs the first.
    """
    view = words.numpy().view(np.uint32)
    for place in np.flatnonzero(view).tolist():
        left = int(view[place])
        while left:
            lowest = left & -left
            yield 32 * place + lowest.bit_length() - 1
            left ^= lowest


def is_only(words: Tensor, token_ids: list[int]) -> bool:
    """Return whether one row's mask allows none but these tokens."""
    rest = words.clone()
    view = rest.numpy().view(np.uint32)
    for token_id in token_ids:
        view[token_id // 32] &= np.uint32(~(1 << (token_id % 32)) & 0xFFFFFFFF)
    return not view.any()


def _apply_on_cpu(words: Tensor, logits: Tensor, rows: Tensor | None, width: int) -> None:
    """Mask these rows, or all, by xgrammar's kernel, which writes to refused tokens alone."""
    import xgrammar

    if rows is None:
        logits[:, width:] = -torch.inf
    else:
        logits[rows, width:] = -torch.inf
        words = words.new_full((logits.shape[0], words.shape[1]), -1).index_copy_(0, rows, words)
    xgrammar.apply_token_bitmask_inplace(logits, words, vocab_size=width)


def _zero_bits(words: Tensor, device: torch.device) -> Tensor:
    """Return which bits of each row's words are 0, on the device: `[rows, 32 * words]` bool."""
    bits = torch.arange(32, dtype=torch.int32, device=device)
    return ((to_device(words.numpy(), device)[:, :, None] >> bits) & 1).flatten(1) == 0
