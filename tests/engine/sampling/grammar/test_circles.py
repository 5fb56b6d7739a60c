"""Grammars and schemas at which a library would end the process: each test compiles in a child."""

import multiprocessing

import pytest

from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engine.sampling.grammar.circles import refuse_circles
from tokenmill_worker.engine.sampling.grammar.compiler import GrammarCompiler
from tokenmill_worker.engine.sampling.grammar.errors import GrammarError

VOCAB = [bytes([byte]) for byte in range(256)] + [b"<end>"]
CIRCLES = [
    "root ::= root{2}",
    "root ::= root",
    'root ::= root{1,3} "" ""',
    "root ::= a\na ::= b{0,}\nb ::= root{2}",
    'root ::= "x"\na ::= a{1000}',
]
LOWEST = -(2**63)


def outcome(wanted):
    """Compile in a process of its own; the message of the refusal, or that it was compiled."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(compiled, (wanted,)).get(timeout=120)


def compiled(wanted):
    compiler = GrammarCompiler.from_vocab(VOCAB, [256])
    try:
        compiler.compile(wanted).result(timeout=60)()
    except GrammarError as error:
        return str(error)
    return "compiled"


def test_rules_that_stand_for_one_another_are_refused_by_name():
    for source in CIRCLES:
        wanted = [
            ResponseFormat(grammar=source),
            ResponseFormat(
                structural_tag={
                    "type": "structural_tag",
                    "format": {"type": "grammar", "grammar": source},
                }
            ),
        ]
        for one in wanted:
            assert "stands for itself" in compiled(one)


@pytest.mark.parametrize(
    "parsed",
    [
        'root ::= ((root{0, -1} "a"))\n',
        'root ::= (("b") | (root{2, 2}))\n',
        "root ::= ((a))\na ::= ((b{1, 3}))\nb ::= (([0-9]))\n",
        'root ::= ((a))\nb ::= ((a))\na ::= (("x"))\n',
    ],
)
def test_rules_that_end_are_no_circle(parsed):
    refuse_circles(parsed)


def test_a_circle_behind_another_rule_is_found():
    with pytest.raises(GrammarError, match=r"the rule [ab] stands for itself"):
        refuse_circles("root ::= ((a))\na ::= ((b{2, 2}))\nb ::= ((a))\n")


LOWEST_SCHEMAS = [
    {"enum": [LOWEST + 1, 1]},
    {"type": "integer", "enum": [LOWEST - 5, 1]},
    {"type": "object", "properties": {"a": {"const": LOWEST}}},
]


@pytest.mark.parametrize(
    ("strict", "words"), [(True, "near -2^63, which is not supported"), (False, "compiled")]
)
def test_the_lowest_integers_do_not_end_the_process(strict, words):
    for schema in LOWEST_SCHEMAS:
        assert words in outcome(ResponseFormat(json_schema=schema, strict=strict))
