"""Parts of a JSON document, given as soon as they are closed."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill import JsonPart, json_parts, json_parts_async

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["\\", '"', '\\"', "]}", "a/b~c", "\ud83d\ude00", "😀"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def expected(value: Any) -> Iterator[JsonPart]:
    """Return the parts by the definition, from the whole document."""
    if not isinstance(value, dict | list):
        yield JsonPart("", value)
    else:
        yield from parts_inside(value, "", is_top=True, is_inside_array=False)


def parts_inside(
    value: Any, pointer: str, *, is_top: bool, is_inside_array: bool
) -> Iterator[JsonPart]:
    is_array = isinstance(value, list)
    names = enumerate(value) if is_array else value.items()
    for name, inner in names:
        where = f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}"
        if isinstance(inner, dict | list):
            inside = is_inside_array or is_array
            yield from parts_inside(inner, where, is_top=False, is_inside_array=inside)
        if is_top or (is_array and not is_inside_array):
            yield JsonPart(where, inner)


@given(
    VALUES,
    st.booleans(),
    st.sampled_from([None, 1, "\t"]),
    st.lists(st.floats(0, 1), max_size=12),
)
def test_a_document_cut_anywhere_gives_the_same_parts(
    value: Any, ascii_only: bool, indent: Any, cuts: list[float]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    places = sorted(round(cut * len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip((0, *places), (*places, len(text)), strict=True)]
    assert list(json_parts(pieces)) == list(expected(json.loads(text)))


@given(VALUES, st.floats(0, 1))
def test_a_part_is_given_with_its_last_character(value: Any, cut: float) -> None:
    """A beginning gives the first of the parts that the whole document gives."""
    text = json.dumps(value)
    whole = list(json_parts([text]))
    if isinstance(value, dict | list):  # a number that is cut is another number
        found = list(json_parts([text[: round(cut * len(text))]]))
        assert found == whole[: len(found)]


def test_array_elements_are_given_before_their_array_is_complete() -> None:
    pieces = ['{"items": [{"a": "]"}', ", [1, [2]], 3", "0], ", '"n": 12', ', "x/y~": {"b": [tr']
    assert [list(json_parts(pieces[:count]))[-1:] for count in range(1, 6)] == [
        [JsonPart("/items/0", {"a": "]"})],
        [JsonPart("/items/1", [1, [2]])],
        [JsonPart("/items", [{"a": "]"}, [1, [2]], 30])],
        [JsonPart("/items", [{"a": "]"}, [1, [2]], 30])],
        [JsonPart("/n", 12)],
    ]
    assert list(json_parts([*pieces, "ue]}}"]))[-2:] == [
        JsonPart("/x~1y~0/b/0", True),
        JsonPart("/x~1y~0", {"b": [True]}),
    ]


def test_an_asynchronous_source_gives_the_same_parts() -> None:
    async def texts() -> AsyncIterator[str]:
        for text in ("[1, ", "2]"):
            yield text

    async def read() -> list[JsonPart]:
        return [part async for part in json_parts_async(texts())]

    assert asyncio.run(read()) == [JsonPart("/0", 1), JsonPart("/1", 2)]


@pytest.mark.parametrize(
    "text",
    [
        "[1 2]", "[1,]", '{"a" 1}', '{"a": 1,}', "{1: 2}", "[1}", '{"a": 1]', "]", "1 2", "[] []",
        "[tru]", "[NaN]", "[01]", '["\\x"]', "[:]", '{"a":}', '["a""b"]', '[1"a"]', "{[]}",
    ],
)  # fmt: skip
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text)
    with pytest.raises(ValueError, match=r"no JSON|Expecting|delimiter|escape|Extra"):
        list(json_parts(text))
