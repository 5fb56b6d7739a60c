"""Tests of the first frame to an engine's process."""

import msgspec
import pytest

from tokenmill_worker.contract.messages import FrameError, Start, read_start


def test_a_first_frame_of_this_version_is_read() -> None:
    start = Start(engine="own", settings={"model": "m"})
    assert read_start(msgspec.msgpack.encode(start)) == start


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"version": "9.9.9"}, "the worker is tokenmill 9.9.9"), ({}, "required field `version`")],
)
def test_a_first_frame_of_another_version_or_none_is_refused(
    changes: dict[str, str], words: str
) -> None:
    frame = {"engine": "own", "settings": {}} | changes
    with pytest.raises(FrameError, match=words):
        read_start(msgspec.msgpack.encode(frame))
