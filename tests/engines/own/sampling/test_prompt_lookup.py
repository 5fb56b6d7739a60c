"""Prompt lookup: the right drafts, at a small cost, and only while they pay."""

import random
import sys
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.engines.own.sampling.helpers import make_sequence
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.sampling import PromptLookup
from tokenmill_worker.engines.own.sampling.prompt_lookup import MIN_MATCH, NgramIndex


def propose(token_ids: list[int], max_tokens: int, min_match: int = MIN_MATCH) -> tuple[int, ...]:
    """Return the draft for a sequence seen for the first time."""
    index = NgramIndex(min_match)
    index.extend(token_ids, len(token_ids))
    return index.continuation(token_ids, max_tokens)


def naive(token_ids: list[int], max_tokens: int, min_match: int) -> list[tuple[int, ...]]:
    """Return every continuation of a longest earlier match of the end."""
    best, found = 0, list[int]()
    for place in range(min_match, len(token_ids)):
        length = 0
        while (
            length < place
            and token_ids[place - 1 - length] == token_ids[len(token_ids) - 1 - length]
        ):
            length += 1
        if length >= min_match and length >= best:
            found = [place] if length > best else [*found, place]
            best = length
    return [tuple(token_ids[p : p + max_tokens]) for p in found]


@given(st.lists(st.integers(0, 2), max_size=20), st.integers(1, 5))
def test_the_draft_follows_a_longest_match(token_ids: list[int], max_tokens: int) -> None:
    draft, wanted = propose(token_ids, max_tokens, min_match=2), naive(token_ids, max_tokens, 2)
    if not wanted:
        assert draft == ()
    else:
        assert len(draft) == max_tokens
        places = [w for w in wanted if draft[: len(w)] == w]
        # beyond the number of candidates that are looked at, a shorter match may be taken
        assert places or len(wanted) + len(token_ids) > 8


def test_the_latest_of_the_longest_matches_is_drafted() -> None:
    assert propose([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1) == (8,)
    assert propose([5, 1, 2, 3, 7, 9, 1, 2, 3, 8, 5, 1, 2, 3], 2) == (7, 9)


def test_a_loop_is_drafted_beyond_its_end() -> None:
    assert propose([9, 1, 2, 1, 2, 1, 2], 5, min_match=2) == (1, 2, 1, 2, 1)


def test_a_sequence_without_a_match_gets_no_draft() -> None:
    assert propose([], 4) == propose([1, 2], 4) == propose([1, 2, 3, 4, 5, 6], 4) == ()


def test_the_index_grows_with_the_sequence() -> None:
    rng = random.Random(3)
    sequence = make_sequence(SamplingParams(), tuple(rng.randrange(4) for _ in range(10)))
    lookup = PromptLookup(3, min_match=2)
    for _ in range(60):
        draft = lookup(sequence)
        assert draft == () or draft == propose(sequence.token_ids, len(draft), min_match=2)
        sequence.token_ids.append(rng.randrange(4))


def test_accepted_drafts_grow_longer_and_refused_drafts_stop() -> None:
    lookup, sequence = PromptLookup(16), make_sequence(SamplingParams(), (1, 2, 3, 4, 5) * 20)
    lengths = []
    for _ in range(6):
        draft = lookup(sequence)
        lengths.append(len(draft))
        sequence.token_ids += draft  # all right
        sequence.token_ids.append(sequence.token_ids[-5])
    assert lengths[-1] == 16
    proposals = 0
    for step in range(400):  # the same ends, but what follows is always new
        proposals += bool(lookup(sequence))
        sequence.token_ids += [1000 + step, 1, 2, 3]
    assert proposals < 40


def test_drafts_resume_when_they_are_accepted_again() -> None:
    lookup, sequence = PromptLookup(8), make_sequence(SamplingParams(), (1, 2, 3, 4, 5) * 4)
    for step in range(6):
        lookup(sequence)
        sequence.token_ids += [1000 + step, 1, 2, 3]
    sequence.token_ids += [7, 8, 9] * 100
    accepted = 0
    for _ in range(20):
        draft = lookup(sequence)
        came = [7, 8, 9] * 4
        accepted += len(draft)
        assert list(draft) == came[: len(draft)]
        sequence.token_ids += came[: len(draft) - len(draft) % 3 + 3]
    assert accepted > 60


def test_a_sequence_with_speculate_false_gets_no_draft() -> None:
    silent = make_sequence(SamplingParams(speculate=False), (1, 2, 3) * 5)
    assert PromptLookup(4)(silent) == ()


def test_a_draft_beside_a_token_in_flight_is_judged_after_all_its_tokens() -> None:
    sequence = make_sequence(SamplingParams(), (1, 2, 3) * 5)
    sequence.num_inflight = 1
    lookup = PromptLookup(16)
    lengths = [len(lookup(sequence))]  # the first token stands for the one in flight
    for token in (1, 2, 3, 1, 2):
        sequence.token_ids.append(token)
        lengths.append(len(lookup(sequence)))
    assert lengths == [5, 5, 5, 5, 5, 9]


def test_release_drops_the_index_of_a_sequence() -> None:
    lookup, sequence = PromptLookup(4), make_sequence(SamplingParams(), (1, 2, 3) * 5)
    assert lookup(sequence)
    lookup.release(sequence)
    lookup.release(sequence)
    assert len(lookup) == 0


def test_a_step_is_cheap_however_long_the_sequence() -> None:
    """Counted in lines that are run, so that no clock can be blamed."""
    assert lines_of_steps(30_000) < 1.5 * lines_of_steps(3_000)


def lines_of_steps(length: int) -> int:
    rng = random.Random(1)
    sequence = make_sequence(SamplingParams(), tuple(rng.randrange(5) for _ in range(length)))
    lookup = PromptLookup(4)
    for _ in range(20):
        lookup(sequence)  # index the prompt
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(200):
            lookup(sequence)
            sequence.token_ids.append(rng.randrange(5))
    finally:
        sys.settrace(before)
    return count
