"""A draft model is told who may draft, and takes no slot that a running sequence may need."""

from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tokenmill_schemas.generation import SamplingParams


def test_drafts_get_only_slots_that_no_running_sequence_may_need() -> None:
    """Three usable blocks of four tokens; each sequence has one, and may need another."""
    loop = Loop.build(make_cache(4), max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    sequence = make_sequence("a", [3, 4], 6, params=params)
    loop.add(sequence)
    loop.step()
    lookahead = loop.scheduler.lookahead
    assert lookahead.sequences() == [(sequence, 4)], "the last token needs no draft"
    assert (lookahead.num_decoding, lookahead.num_free_drafts) == (1, 15)
    assert lookahead.reserve(sequence, 1) == 1, "its block has a slot"
    assert lookahead.reserve(sequence, 3) == 3, "two blocks are free and it needs one at most"
    silent = SamplingParams(max_tokens=6, ignore_eos=True, speculate=False)
    loop.add(make_sequence("b", [3, 5], 6, params=silent))
    loop.step()
    assert [found for found, _ in lookahead.sequences()] == [sequence]
    assert lookahead.reserve(sequence, 8) == sequence.num_slots - sequence.num_tokens < 8


def test_drafts_get_no_free_block_that_a_running_sequence_may_need() -> None:
    loop = Loop.build(make_cache(4), max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first, second = (
        make_sequence(name, [3, place], 6, params=params) for place, name in [(4, "a"), (5, "b")]
    )
    loop.add(first, second)
    loop.step()
    assert loop.scheduler.kv.pool.num_free == 1
    assert loop.scheduler.lookahead.reserve(first, 3) == 1
