"""Tests of what the engine process sets before it loads torch."""

import pytest

from tokenmill_worker.engines.process.child import set_allocator


def test_the_allocator_is_set_to_expandable_segments() -> None:
    environment = {"PATH": "/bin"}
    set_allocator(environment)
    assert environment == {"PATH": "/bin", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_variable_that_is_set_is_kept(name: str) -> None:
    environment = {name: "max_split_size_mb:64"}
    set_allocator(environment)
    assert environment == {name: "max_split_size_mb:64"}
