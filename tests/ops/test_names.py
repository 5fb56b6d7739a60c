"""The check of names: retired words and repeated classes are found, exceptions pass."""

from pathlib import Path

import pytest

from ops.tools import names


@pytest.mark.parametrize(
    "line", ["voucher = 1", "def take_voucher(): ...", "class VoucherCount: ...", "-- the voucher"]
)
def test_a_retired_word_is_found(line: str) -> None:
    (found,) = names.problems({"worker/x.lua": f"ok\n{line}"})
    assert found == "worker/x.lua:2: 'voucher' is retired: write 'ownership version'"


def test_a_retired_definition_is_found() -> None:
    found = list(
        names.problems(
            {
                "worker/x.py": "class A:\n    async def hand_in(self): ...\n\nclass Pump: ...",
                "worker/x.lua": "-- let_go\nlocal function let_go(id) end",
                "worker/x.h": "class Team {\n    void each_handed_in(int64_t count) {}\n};",
                "tests/x.py": "class Desk: ...\n\nclass Pump: ...",
            }
        )
    )
    assert sorted(found) == [
        "tests/x.py:1: 'Desk' is retired: use JobSink or BulkSetup",
        "worker/x.h:1: 'Team' is retired: use PoolThread",
        "worker/x.h:2: 'each_handed_in' is retired: use parallel_for_commit",
        "worker/x.lua:2: 'let_go' is retired: use release_ownership",
        "worker/x.py:2: 'hand_in' is retired: use submit",
        "worker/x.py:4: 'Pump' is retired: use BatchFeeder",
    ]


def test_a_personification_in_a_test_is_found() -> None:
    text = "async def test_a_reader_is_told(): ...\n\nclass Heard: ...\n\nsaid = 1"
    assert list(names.problems({"tests/x.py": text, "worker/x.py": text})) == [
        "tests/x.py:1: 'told' in 'async def test_a_reader_is_told': name what is asserted",
        "tests/x.py:3: 'heard' in 'class Heard: ...': name what is asserted",
    ]


@pytest.mark.parametrize(
    "name",
    ["test_it_ends", "test_what_is_refused", "test_one_of_theirs", "test_times_that_are_none"],
)
def test_a_test_name_without_a_subject_is_found(name: str) -> None:
    assert list(names.problems({"tests/x.py": f"def {name}(): ..."})) == [
        f"tests/x.py:1: {name} has no subject: name subject, condition and result"
    ]


def test_a_test_name_with_a_pronoun_behind_its_subject_is_accepted() -> None:
    text = "def test_a_disk_refuses_writes_until_it_is_freed(): ...\n\nit_ends = what_is = 1"
    assert not list(names.problems({"tests/x.py": text}))


def test_other_words_and_exceptions_are_accepted() -> None:
    assert not list(names.problems({"worker/x.py": "airplane = handsome = 1"}))
    assert not list(names.problems({"worker/x.py": "step.straight = Stage().hand_in()"}))
    assert not list(
        names.problems({"worker/tokenmill_worker/engines/own/cuda/draw_cut.py": "lane = 1"})
    )


def test_a_class_defined_in_two_files_is_found() -> None:
    (found,) = names.problems({"a.py": "class Row: ...", "b.py": "class Row: ..."})
    assert found == "class Row is defined in a.py, b.py: give each a name of its own"


def test_this_repository_has_no_problem_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert names.main(Path(__file__).parents[2]) == 0, capsys.readouterr().out
