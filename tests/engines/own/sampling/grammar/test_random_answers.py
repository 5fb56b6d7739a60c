"""Counts random answers under JSON schemas: none may break its schema in silence, and each refusal
is a sentence.
"""

import json
import re
from typing import Any

import pytest

from tests.engines.own.sampling.grammar.random_answers import TYPED, count, is_broken
from tests.engines.own.sampling.grammar.test_masks import EOS, VOCAB
from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engines.own.sampling import GrammarCompiler

EARLIER: list[dict[str, Any]] = [
    {"$schema": f"http://json-schema.org/{draft}/schema#", **schema}
    for draft in ("draft-04", "draft-06", "draft-07")
    for schema in (
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        {"$ref": "#/definitions/n", "definitions": {"n": {"type": "integer"}}, "minimum": 5},
    )
]
INVALID: list[dict[str, Any]] = [
    {"type": 5},
    {"minimum": "a"},
    {"$schema": "http://x.test/y"},
    {"$ref": "http://x.test/y"},
    {"type": "number", "multipleOf": 1e-30},
]
SCHEMAS = [*TYPED, *EARLIER, *INVALID]


@pytest.mark.parametrize("answers", [2, pytest.param(40, marks=pytest.mark.long)])
async def test_no_random_answer_violates_its_schema_unreported(
    answers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await count(SCHEMAS, GrammarCompiler.from_vocab(VOCAB, [EOS]), answers, 200)
    lines = capsys.readouterr().out.splitlines()
    refusals = [line.partition(" refused: ")[2] for line in lines if " refused: " in line]
    reported = [line for line in lines if line.startswith("reported: ")]
    assert found["silent"] == 0
    assert len(reported) == found["reported"]
    # the grammar knows no leap years
    assert [line for line in reported if '-02-29" is not a "date"' not in line] == []
    assert len(refusals) >= len(INVALID)
    for refusal in refusals:
        assert re.match(
            r"response_format\.json_schema (cannot be enforced|is no valid .+): .", refusal
        )
    num_refused = len(INVALID) + 3  # look-ahead, branches that overlap, a text that is a number
    assert found["refused"] == num_refused
    assert int(str(found["finished"])) > answers * (len(SCHEMAS) - num_refused) // 2


async def test_an_answer_that_violates_its_schema_is_counted() -> None:
    real = GrammarCompiler.from_vocab(VOCAB, [EOS])

    def compile_any(kind: str, source: str) -> Any:
        """Make a grammar of numbers for every schema."""
        assert (kind, json.loads(source)) == ("json", {"type": "string"})
        return real.compile(
            ResponseFormat(json_schema={"type": "integer", "maximum": 9, "minimum": 0})
        ).result(60)

    broken = GrammarCompiler.from_vocab(VOCAB, [EOS], compile_source=compile_any)
    found = await count([{"type": "string"}], broken, 3, 200)
    assert found == {"schemas": 1, "refused": 0, "finished": 3, "reported": 3, "silent": 0}


@pytest.mark.parametrize(
    ("schema", "text", "broken"),
    [
        ({"multipleOf": 0.0001}, "2.4", False),
        ({"multipleOf": 0.0001}, "2.40005", True),
        ({"type": "integer"}, "1.0", False),
        ({"type": "integer"}, "1.5", True),
        ({"type": "string"}, "1", True),
    ],
)
def test_numbers_are_read_exactly(schema: dict[str, Any], text: str, broken: bool) -> None:
    assert is_broken(schema, text) is broken
