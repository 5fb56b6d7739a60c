"""Stop strings, against a reference that looks at the whole text at once."""

from hypothesis import given
from hypothesis import strategies as st

from tokenmill_worker.text.choice_text import StopFinder

LETTERS = st.text("abé\n", max_size=40)
STOPS = st.lists(st.text("abé\n", min_size=1, max_size=6), max_size=4)


def cut(text, stops):
    """Cut the text, by str.find, before the stop string that is complete first.

    Of several that are complete at once, the longest counts. Returns None without any.
    """
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else None


def split(text, sizes):
    pieces, position = [], 0
    for size in sizes:
        pieces.append(text[position : position + size])
        position += size
    return [*pieces, text[position:]]


@given(LETTERS, STOPS, st.lists(st.integers(0, 5), max_size=30))
def test_text_in_any_pieces_is_cut_like_the_whole_text(text, stops, sizes):
    finder = StopFinder(stops)
    given_out = "".join(finder.push(piece) for piece in split(text, sizes))
    expected = cut(text, stops)
    if expected is None:
        assert not finder.stopped
        assert given_out + finder.flush() == text
    else:
        assert finder.stopped
        assert given_out == expected
        assert finder.push("more") == ""
        assert finder.flush() == ""


@given(LETTERS, STOPS)
def test_exactly_the_possible_beginning_of_a_stop_string_is_held_back(text, stops):
    finder = StopFinder(stops)
    seen = given_out = ""
    for letter in text:
        given_out += finder.push(letter)
        seen += letter
        if finder.stopped:
            return
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((len(b) for b in beginnings if seen.endswith(b)), default=0)
        assert given_out == seen[: len(seen) - held]


def test_a_stop_string_across_many_pieces_is_cut_exactly():
    finder = StopFinder(["###END"])
    assert [finder.push(piece) for piece in ["Hello #", "#", "# no ##", "#E", "ND tail"]] == [
        "Hello ",
        "",
        "### no ",
        "",
        "",
    ]
    assert finder.stopped


def test_the_stop_string_that_completes_first_cuts_the_text():
    for pieces in (["xabcd"], list("xabcd")):
        finder = StopFinder(["abcd", "bc"])
        assert "".join(finder.push(piece) for piece in pieces) == "xa"


def test_of_two_stop_strings_completed_at_once_the_longer_cuts():
    finder = StopFinder(["b", "ab"])
    assert finder.push("xab") == "x"


def test_a_failed_beginning_is_returned_and_may_restart_inside_itself():
    finder = StopFinder(["aab"])
    assert [finder.push(letter) for letter in "aaab"] == ["", "", "a", ""]
    assert finder.stopped


def test_a_long_possible_beginning_is_searched_in_linear_time():
    finder = StopFinder(["a" * 1000 + "b"] * 3)
    text = "".join(finder.push("a") for _ in range(20_000))  # quadratic work would take minutes
    assert len(text) == 20_000 - 1000
