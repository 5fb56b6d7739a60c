"""Draws random answers under JSON schemas: counts refused schemas and answers that break theirs.

Tokens are drawn evenly from those that the mask allows, ends preferred; that is harsher than any
model. Every finished answer is validated as a worker does (`reported`) and by another library,
jsonschema (`silent`: only jsonschema finds it broken). With a real model's vocabulary, and the
schemas of a folder tests/draft2020-12 of the JSON-Schema-Test-Suite:

    python -m tests.engines.own.sampling.grammar.random_answers --suite FOLDER --answers 36
"""

# ruff: noqa: T201 - a command: it prints
import argparse
import asyncio
import json
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch

from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.checking import AnswerChecker
from tokenmill_worker.engines.own.model.model_files import resolve
from tokenmill_worker.engines.own.model.vocabulary import vocabulary
from tokenmill_worker.engines.own.sampling import GrammarCompiler, GrammarError

TYPED: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
    {"type": "object", "required": ["a"]},
    {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5},
    {"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"allOf": [{"type": "integer"}], "minimum": 5},
    {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]},
    {"type": "number", "multipleOf": 5},
    {"type": "integer", "enum": [1, 2.5]},
    {"type": "string", "const": 1},
    {"enum": ["abc", "a"], "maxLength": 1, "type": "string"},
    {"type": "string", "pattern": "^(?!foo)[a-z]+$"},
    {"type": "string", "format": "ipv4", "pattern": "^1"},
    *({"minimum": 1.1}, {"maxItems": 2}, {"minLength": 2}, {"pattern": "^a*$"},
      {"maxProperties": 0}),
    {"type": "object", "properties": {"a": {"type": "integer"}}, "propertyNames": {"maxLength": 1}},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "required": ["x1"]},
    {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    {"$defs": {"s": {"$dynamicAnchor": "s", "type": "string"}},
     "items": {"$dynamicRef": "#s"}, "type": "array"},
    {"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "v": {"type": "integer"}},
     "required": ["k"],
     "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["v"]},
     "additionalProperties": False},
    {"type": "object", "properties": {"day": {"type": "string", "format": "date"},
                                      "n": {"type": ["integer", "null"]}},
     "required": ["day", "n"], "additionalProperties": False},
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite", type=Path, help="a folder of schemas, besides our own")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--answers", type=int, default=6, help="of each schema")
    parser.add_argument("--max-tokens", type=int, default=200)
    options = parser.parse_args()
    folder = resolve(options.model)
    config = json.loads((folder / "config.json").read_text())
    ends = config["eos_token_id"]
    stops = frozenset(ends if isinstance(ends, list) else [ends])
    words = vocabulary(folder, config["vocab_size"], stops, False)
    assert words is not None
    compiler = GrammarCompiler(words.info, special_ids=words.special_ids, encode=words.encode)
    schemas = [*TYPED, *(suite(options.suite) if options.suite else ())]
    asyncio.run(count(schemas, compiler, options.answers, options.max_tokens))


def suite(folder: Path) -> list[dict[str, Any]]:
    groups = [
        group for file in sorted(folder.glob("*.json")) for group in json.loads(file.read_text())
    ]
    return [group["schema"] for group in groups if isinstance(group["schema"], dict)]


async def count(
    schemas: list[dict[str, Any]], compiler: GrammarCompiler, answers: int, max_tokens: int
) -> dict[str, int]:
    checker, writer = AnswerChecker(), Writer(compiler, max_tokens)
    refused: Counter[str] = Counter()
    finished = reported = silent = 0
    for schema in schemas:
        try:
            make_matcher = compiler.compile(ResponseFormat(json_schema=schema)).result(60)
        except GrammarError as error:
            refused[str(error)] += 1
            continue
        for _ in range(answers):
            text = writer.write(make_matcher())
            if text is None:
                continue
            finished += 1
            if (problem := await checker.violation(schema or {"type": "object"}, text)) is not None:
                reported += 1
                print(f"reported: {str(schema)[:200]}: {problem}")
            elif is_broken(schema, text):
                silent += 1
                print(f"silent of {str(schema)[:200]}: {text[:200]!r}")
    await checker.close()
    for sentence, times in refused.most_common():
        print(f"{times:4} refused: {sentence}")
    found = {
        "schemas": len(schemas),
        "refused": refused.total(),
        "finished": finished,
        "reported": reported,
        "silent": silent,
    }
    print(*(f"{name} {value}" for name, value in found.items()), sep=", ")
    return found


class Writer:
    """Draws answers token by token, with a fixed seed."""

    def __init__(self, compiler: GrammarCompiler, max_tokens: int) -> None:
        info = compiler.tokenizer_info
        self._vocab: list[bytes] = info.decoded_vocab
        self._stops = list(info.stop_token_ids)
        self._width = int(info.vocab_size)
        self._max_tokens = max_tokens
        self._draw = np.random.default_rng(0)
        self._ends = np.zeros(self._width, np.bool_)
        self._ends[: len(self._vocab)] = [
            any(byte in word for byte in b'"}],') for word in self._vocab
        ]

    def write(self, matcher: Any) -> str | None:
        """Draw an answer; return None if it is not finished within `max_tokens`."""
        text = b""
        words = torch.zeros((1, -(-self._width // 32)), dtype=torch.int32)
        for _ in range(self._max_tokens):
            if matcher.is_terminated():
                return text.decode("utf-8", "replace")
            matcher.fill_next_token_bitmask(words, 0)
            allowed = np.flatnonzero(
                np.unpackbits(words.numpy().view(np.uint8)[0], bitorder="little")[: self._width]
            )
            open_ids = allowed[~np.isin(allowed, self._stops)]
            if len(open_ids) < len(allowed) and (not len(open_ids) or self._draw.random() < 0.5):
                return text.decode("utf-8", "replace")
            closing = open_ids[self._ends[open_ids]]
            token_id = int(
                self._draw.choice(
                    closing if len(closing) and self._draw.random() < 0.35 else open_ids
                )
            )
            if not matcher.accept_token(token_id):
                raise RuntimeError(f"token {token_id} is allowed and not accepted")
            text += self._vocab[token_id]
        return None


def is_broken(schema: dict[str, Any], text: str) -> bool:
    """Validate with floats and with decimals: a float is no exact multiple of 0.0001, a decimal 1.0
    no integer.
    """
    make = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        if make(schema).is_valid(json.loads(text)):
            return False
        return not make(exact).is_valid(json.loads(text, parse_float=Decimal))
    # numbers and patterns that Python cannot hold
    except (ArithmeticError, RecursionError, re.error):
        return False


if __name__ == "__main__":
    main()
