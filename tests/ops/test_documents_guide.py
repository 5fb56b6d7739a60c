"""The guide to the documents: every row names a file and tests that exist, and has a verdict.

A figure that was measured stands in the page that the row names, else in results.md.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ops" / "guides" / "documents.md").read_text(encoding="utf-8")
VERDICTS = ("same", "better because ", "left out ", "not done yet: ")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and line.count(" | ") == 4 and not line.startswith("| the document |")
]
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))
}
BENCHMARKS = ROOT / "ops" / "benchmarks"
RESULTS = (BENCHMARKS / "results.md").read_text(encoding="utf-8")
HISTORY = (BENCHMARKS / "history.md").read_text(encoding="utf-8")
FOUND = Counter(next((v for v in VERDICTS if row[4].startswith(v)), row[4]) for row in ROWS)


def test_every_row_has_one_of_four_verdicts_and_the_page_counts_them() -> None:
    assert set(FOUND) <= set(VERDICTS)
    assert len(ROWS) > 130
    counted = [len(ROWS), *(FOUND[verdict] for verdict in VERDICTS)]
    (sentence,) = re.findall(r"^(\d+) rows: (\d+) same, (\d+) .*, (\d+) .*, (\d+) ", PAGE, re.M)
    assert [int(number) for number in sentence] == counted


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_each_row_is_short_and_names_existing_files_and_tests(row: list[str]) -> None:
    capability, section, ours, tests, verdict = row
    assert len(capability.split()) <= 12
    assert section
    (path,) = re.fullmatch(r"`([\w/.]+)`", ours).groups()  # type: ignore[union-attr]
    assert any((root / path).is_file() for root in (ROOT, ROOT / "worker" / "tokenmill_worker"))
    names = re.findall(r"`(test_\w+)`", tests)
    assert tests == (", ".join(f"`{name}`" for name in names) or "–")
    assert [name for name in names if name not in DEFINED] == []
    if verdict.startswith(VERDICTS[:2]) and not names:
        assert "measured" in verdict, "neither a test nor a measurement shows it"


def figures(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text))


@pytest.mark.parametrize(
    "remark",
    [row[4] for row in ROWS if re.search("measured|simulated|counted", row[4])],
    ids=lambda remark: remark[:40],
)
def test_a_measured_figure_is_in_the_page_and_section_that_its_row_names(remark: str) -> None:
    source = HISTORY if "history.md" in remark else RESULTS
    for title in re.findall(r"history\.md\), ([^)]+)\)", remark):
        (source,) = re.findall(rf"^## {title}\b.*?(?=^## |\Z)", HISTORY, re.M | re.S)
    assert figures(remark) - figures(source) == set()


def test_the_table_of_transformers_tests_names_existing_tests_and_counts_cases() -> None:
    _, section = PAGE.split("\n## Transformers' own tests\n")
    rows = re.findall(r"^\| (.+) \| (\d+) \| (.+) \| (.+) \|$", section, re.M)
    cases = Counter({"pass": 0, "refused": 0})
    for _, count, ours, result in rows:
        assert set(re.findall(r"`(\w+)`", ours)) <= DEFINED
        cases[re.split("[ ;]", result)[0]] += int(count)
    (sentence,) = re.findall(r"these (\d+) cases .*?(\d+) pass, (\d+) is refused", section, re.S)
    assert [int(n) for n in sentence] == [sum(cases.values()), cases["pass"], cases["refused"]]
