"""Tests of block hashes, and of the longest hit of mixed layer groups against brute force."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.engines.own.scheduler.loop import make_sequence
from tokenmill_worker.contract.requests import MediaSpan
from tokenmill_worker.engines.own.config.cache import Window, first_visible
from tokenmill_worker.engines.own.kv.prefix_cache import (
    BlockHasher,
    CachedPrefix,
    deepest_visible,
    first_visible_block,
    longest_hit,
    longest_prefix,
    root_hash,
)


def hashes(
    tokens: list[int], salt: str = "", model: str = "m", generation: int = 0, size: int = 4
) -> list[bytes]:
    hasher = BlockHasher(size, model)
    hasher.generation = generation
    return hasher.extend(make_sequence("r", tokens, cache_salt=salt))


def test_only_full_blocks_have_hashes_of_256_bits() -> None:
    found = hashes(list(range(10)))
    assert [len(one) for one in found] == [32, 32]


def test_a_block_s_hash_covers_all_tokens_before_it() -> None:
    first, second = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[:1] == hashes([1, 2, 3, 4])


def test_different_tenants_models_and_generations_share_no_hash() -> None:
    tokens = [1, 2, 3, 4]
    variants = [
        hashes(tokens),
        hashes(tokens, salt="a"),
        hashes(tokens, model="n"),
        hashes(tokens, generation=1),
    ]
    assert len({one[0] for one in variants}) == 4


def test_equal_ids_that_stand_for_other_pictures_share_no_block_from_the_picture_on() -> None:
    def with_picture(*digests: bytes) -> list[bytes]:
        media = tuple(MediaSpan(3 + 4 * i, 2, "image", each) for i, each in enumerate(digests))
        sequence = make_sequence("r", list(range(8)), media=media)
        return list(BlockHasher(2, "m").extend(sequence))

    plain = with_picture()
    one, other, again = with_picture(b"one"), with_picture(b"other"), with_picture(b"one")
    assert one == again
    assert one[0] == other[0] == plain[0]  # before the picture
    assert not {*one[1:]} & {*other[1:], *plain[1:]}
    two = with_picture(b"one", b"two")
    assert (two[:3], two[3] == one[3]) == (one[:3], False)


def test_different_extra_keys_have_different_root_hashes() -> None:
    assert root_hash("ab", 0, "c") != root_hash("a", 0, "bc")
    assert root_hash("m", 1, "") != root_hash("m", 0, "1")
    assert root_hash("m", 0, "generation") != root_hash("m", 0, "")


def test_token_ids_that_could_be_confused_as_bytes_have_different_hashes() -> None:
    assert hashes([1, 256, 0, 0]) != hashes([1, 0, 1, 0])
    assert hashes([1, 2**40, 3, 4]) != hashes([1, 2, 3, 4])


def test_a_grown_sequence_hashes_only_its_new_blocks() -> None:
    hasher = BlockHasher(2, "m")
    sequence = make_sequence("r", [1, 2, 3])
    first = list(hasher.extend(sequence))
    sequence.token_ids += [4, 5]
    assert hasher.extend(sequence)[:1] == first
    assert len(sequence.block_hashes) == 2
    assert sequence.block_hashes == hashes([1, 2, 3, 4, 5], size=2)


def test_the_window_counts_the_query_itself() -> None:
    assert first_visible_block(8, None, 4) == 0
    assert first_visible_block(8, Window(5), 4) == 1  # sees 4..8
    assert first_visible_block(8, Window(6), 4) == 0  # sees 3..8
    assert first_visible_block(2, Window(100), 4) == 0


def test_a_chunk_begins_at_a_multiple_of_its_size() -> None:
    chunks = Window(6, is_chunked=True)
    positions = (0, 5, 6, 11, 12, 19)
    assert [first_visible(position, chunks) for position in positions] == [0, 0, 6, 6, 12, 18]


CHUNKS = [Window(size, is_chunked=True) for size in (2, 3, 8)]


def brute_force(
    present: list[set[int]], windows: list[Window | None], limit: int, sizes: list[int]
) -> int:
    for end in range(limit, 0, -1):
        if all(
            end % size == 0
            and set(range(first_visible_block(end, window, size), end // size)) <= group
            for group, window, size in zip(present, windows, sizes, strict=True)
        ):
            return end
    return 0


@given(
    groups=st.lists(
        st.tuples(
            st.sets(st.integers(0, 19)),
            st.sampled_from([None, *map(Window, (1, 2, 4, 5, 9, 17)), *CHUNKS]),
            st.sampled_from([1, 2, 3]),
        ),
        min_size=1,
        max_size=3,
    ),
    limit=st.integers(0, 20),
    block_size=st.sampled_from([1, 4]),
)
@example(groups=[({0, 1}, Window(2), 2), (set(range(4)), None, 3)], limit=12, block_size=1)
def test_the_longest_hit_of_mixed_groups(
    groups: list[tuple[set[int], Window | None, int]], limit: int, block_size: int
) -> None:
    present, windows = [group[0] for group in groups], [group[1] for group in groups]
    sizes = [block_size * group[2] for group in groups]
    keys = [[bytes((number, index)) for index in range(20)] for number in range(len(groups))]
    found = longest_hit(limit, keys, lambda key: key[1] in present[key[0]], windows, sizes)
    assert found == brute_force(present, windows, limit, sizes)


@pytest.mark.parametrize(
    ("cached", "window", "states", "expected"),
    [
        (set(range(10)), None, {5}, CachedPrefix(96, checkpoints=(160, 192))),  # 64 tokens later
        (set(range(10)), None, {6}, CachedPrefix(112, checkpoints=(192,))),
        (set(range(10)), None, {10}, CachedPrefix(0, checkpoints=(160, 192))),
        ({9}, Window(16), {5}, CachedPrefix(0, checkpoints=(160, 192))),  # it lacks block 5
        ({5, 9}, Window(16), {5}, CachedPrefix(96, checkpoints=(160, 192))),
    ],
)
def test_a_prefix_of_a_recurrent_model_ends_where_states_are_kept(
    cached: set[int], window: Window | None, states: set[int], expected: CachedPrefix
) -> None:
    """Blocks of 16 tokens; `states` are the blocks after which states are kept."""
    keys = [[bytes((index,)) for index in range(12)]]
    found = longest_prefix(
        200, keys, lambda key: key[0] in cached, [window], [16], lambda key: key[0] in states
    )
    assert found == expected


@pytest.mark.parametrize(("pending", "expected"), [(b"a", None), (b"b", b"b")])
def test_only_a_pending_block_that_the_next_query_sees_is_awaited(
    pending: bytes, expected: bytes | None
) -> None:
    keys, windows = [[b"a", b"b"]], list[Window | None]([Window(16)])
    assert deepest_visible(32, keys, lambda key: key == pending, windows, [16]) == expected
