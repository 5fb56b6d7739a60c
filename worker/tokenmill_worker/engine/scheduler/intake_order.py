"""Orders requests that arrive together, so that shared prefixes hit the cache."""

from tokenmill_worker.engine.sequence import Sequence


def for_prefix_hits(sequences: list[Sequence], block_size: int) -> list[Sequence]:
    """Return the sequences with those that share their first block side by side.

    Groups keep the order in which their first members arrived. Within a group, descending token
    order puts a prompt before its own prefixes, so that one computation serves all of them.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], list[Sequence]] = {}
    for sequence in sequences:
        first_block = tuple(sequence.token_ids[:block_size])
        groups.setdefault((sequence.cache_salt, sequence.adapter, first_block), []).append(sequence)
    ordered: list[Sequence] = []
    for group in groups.values():
        if len(group) > 1:
            group.sort(
                key=lambda sequence: sequence.token_ids, reverse=True
            )  # stable: choices keep their order
        ordered += group
    return ordered
