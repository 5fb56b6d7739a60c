"""The letters of a special token in a grammar are text: they never become the token, and the answer
has them as they are written.
"""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import tokenizers
from tests.support.marks import long_unless
from tokenmill_schemas.chat import Tool, ToolFunction
from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams
from tokenmill_worker.engines.own.model.vocabulary import Vocabulary, vocabulary
from tokenmill_worker.engines.own.sampling import GrammarCompiler
from tokenmill_worker.engines.own.sampling.grammar.bitmasks import allowed_ids, open_masks
from tokenmill_worker.text.chat.call_parser import CallParser
from tokenmill_worker.text.chat.tools import (
    HERMES,
    MISTRAL_LIST,
    PYTHONIC,
    XML,
    ToolFormat,
    call_grammar,
    call_ids,
)
from tokenmill_worker.text.job_output import JobOutput
from tokenmill_worker.text.token_pieces import Detokenizer
from tokenmill_worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(900)  # gemma has 262,144 tokens

# tokenizer → letters of special tokens, the end of an answer first
LETTERS: dict[str, tuple[str, ...]] = {
    "smollm2": ("<|im_end|>", "<|endoftext|>", "<repo_name>"),
    "gemma3": ("<eos>", "<unused0>"),
    "byte_level": ("<end>", "<pad>"),
    "llama_like": ("<end>", "<pad>"),
    "hermes": ("<end>", "<tool_call>", "</tool_call>"),
}
REAL = ("smollm2", "gemma3")
ALL = [
    (name, letters, drafts)
    for name, every in LETTERS.items()
    for letters in every
    for drafts in (True, False)
]
# the large vocabularies once each: every step reads a mask over all tokens
ONCE = (("smollm2", "<|im_end|>", False), ("gemma3", "<unused0>", True))
MARKED = ("a</tool_call>b", "a<end>b", "<tool_call>", "</tool_call>\n")
CONST_OR_ONE_OF_TWO = [*itertools.product(MARKED, (True, False))]
CASES = long_unless([case for case in ALL if case[0] not in REAL or case in ONCE], ALL)


class Model:
    """A tokenizer, and the compiler of its vocabulary."""

    def __init__(self, name: str, folder: Path) -> None:
        self.tokenizer: Tokenizer = getattr(tokenizers, name)()
        if name not in REAL:
            # a test needs the files that an engine reads
            self.tokenizer._tokenizer.save_pretrained(folder)
        else:
            folder = Path(self.tokenizer._tokenizer.name_or_path)
        (self.stop,) = self.tokenizer.eos_token_ids
        found = vocabulary(folder, self.tokenizer.vocab_size, frozenset({self.stop}), False)
        assert found is not None
        self.words: Vocabulary = found
        self.compiler = GrammarCompiler(
            found.info, special_ids=found.special_ids, encode=found.encode
        )

    def answer(self, wanted: ResponseFormat, *, drafts: bool) -> list[int]:
        """Return random tokens that the grammar allows, or those that it proposes as drafts, and
        check that no special token is among what is allowed, but the end at the end.
        """
        matcher, rng = self.compiler.compile(wanted).result(60)(), random.Random(1)
        mask, found = open_masks(1, self.words.info.vocab_size), list[int]()
        special = {*self.words.special_ids, self.stop}
        while True:
            for token_id in matcher.forced_tokens() if drafts else ():
                assert token_id not in special - self.marks(wanted)
                if not matcher.accept_token(token_id):
                    break
                found.append(token_id)
            matcher.fill_next_token_bitmask(mask, 0)
            allowed = allowed_ids(mask[0])
            if self.stop in allowed:
                assert allowed == [self.stop]
                return found
            assert not (special - self.marks(wanted)).intersection(allowed)
            found.append(rng.choice(allowed))
            assert matcher.accept_token(found[-1])

    def marks(self, wanted: ResponseFormat) -> set[int]:
        return set() if wanted.calls is None else {*wanted.calls.marks.values()}

    def text(self, token_ids: list[int]) -> str:
        detokenizer: Detokenizer = self.tokenizer.detokenizer()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            made[name] = Model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def literal(text: str) -> str:
    return json.dumps(text)


def siblings(letters: str) -> dict[str, tuple[ResponseFormat, str]]:
    """Return the ways of a request to fix a text, each with the only answer."""
    text = f"a{letters}b{letters}"
    members: dict[str, Any] = {
        "type": "object",
        "properties": {letters: {"const": 1}},
        "required": [letters],
        "additionalProperties": False,
    }

    def schema(schema: dict[str, Any]) -> ResponseFormat:
        return ResponseFormat(json_schema=schema)

    def tag(form: dict[str, Any]) -> ResponseFormat:
        return ResponseFormat(structural_tag={"type": "structural_tag", "format": form})

    escaped = "".join(f"\\{c}" if c in "|/" else c for c in letters)
    return {
        "const": (schema({"const": text}), literal(text)),
        "const alone": (schema({"const": letters}), literal(letters)),
        "one enum value": (schema({"enum": [letters]}), literal(letters)),
        "pattern": (schema({"type": "string", "pattern": f"^{escaped}$"}), literal(letters)),
        "property": (schema(members), f'{{"{letters}": 1}}'),
        "regex": (ResponseFormat(regex=f"x{escaped}y"), f"x{letters}y"),
        "EBNF": (ResponseFormat(grammar=f"root ::= {literal(text)}"), text),
        "text of a tag": (tag({"type": "const_string", "value": text}), text),
        "begin of a tag": (
            tag({
                "type": "tag",
                "begin": letters,
                "content": {"type": "const_string", "value": "x"},
                "end": letters,
            }),
            f"{letters}x{letters}",
        ),
    }  # fmt: skip


@pytest.mark.parametrize(("name", "letters", "drafts"), CASES)
def test_letters_of_a_special_token_in_fixed_text_stay_letters(
    model: Callable[[str], Model], name: str, letters: str, drafts: bool
) -> None:
    for kind, (wanted, answer) in siblings(letters).items():
        found = model(name).text(model(name).answer(wanted, drafts=drafts))
        assert found.strip(" ") == answer, kind


@pytest.mark.parametrize("name", long_unless(LETTERS.keys() - {"gemma3"}, LETTERS))
def test_a_choice_among_letters_of_special_tokens_is_text(
    model: Callable[[str], Model], name: str
) -> None:
    texts = LETTERS[name]
    wanted = ResponseFormat(grammar=f"root ::= {' | '.join(map(literal, texts))}")
    assert model(name).text(model(name).answer(wanted, drafts=False)).strip(" ") in texts


@pytest.mark.parametrize(
    ("value", "is_const"),
    long_unless({(value, True) for value in MARKED} | {(MARKED[0], False)}, CONST_OR_ONE_OF_TWO),
)
@pytest.mark.parametrize("form", [HERMES, MISTRAL_LIST, XML, PYTHONIC],
                         ids=["hermes", "mistral", "xml", "pythonic"])  # fmt: skip
def test_an_argument_with_the_letters_of_a_mark_is_read_back(
    model: Callable[[str], Model], form: ToolFormat, value: str, is_const: bool
) -> None:
    hermes = model("hermes")
    marks = hermes.tokenizer.special_marks(form)
    assert bool(marks) == (form in (HERMES, XML))
    values = {"const": value} if is_const else {"enum": [value, value + value]}
    schema = {"properties": {"x": values}, "required": ["x"], "additionalProperties": False}
    tools = (Tool(ToolFunction("f", parameters=schema)),)
    calls = call_grammar(form, marks, tools, "required", is_parallel=False)
    for drafts in (True, False):
        ids = hermes.answer(ResponseFormat(calls=calls), drafts=drafts)
        output = JobOutput.start(
            hermes.tokenizer,
            SamplingParams(),
            calls=lambda choice: CallParser(calls, call_ids("j", choice, 24)),
        )
        for token_id in ids:
            output.push(0, (token_id,))
        output.end(0, FinishReason.STOP, with_last_token=True)
        (call,) = output.results()[0].tool_calls
        assert json.loads(call.arguments)["x"] in (value, value if is_const else value + value)
        assert call.is_complete


def test_special_tokens_that_a_tag_names_as_tokens_are_tokens(
    model: Callable[[str], Model],
) -> None:
    hermes = model("hermes")
    ids = hermes.tokenizer.special_marks(HERMES)
    for token in ("<tool_call>", ids["<tool_call>"]):
        form = {
            "type": "sequence",
            "elements": [
                {"type": "token", "token": token},
                {"type": "const_string", "value": "</tool_call>"},
            ],
        }
        tag: dict[str, object] = {"type": "structural_tag", "format": form}
        matcher = hermes.compiler.compile(ResponseFormat(structural_tag=tag)).result(60)()
        assert matcher.forced_tokens() == []
        for token_id in (ids["<tool_call>"], *b"</tool_call>"):
            mask = open_masks(1, hermes.words.info.vocab_size)
            matcher.fill_next_token_bitmask(mask, 0)
            assert allowed_ids(mask[0]) == [token_id]
            assert matcher.accept_token(token_id)
