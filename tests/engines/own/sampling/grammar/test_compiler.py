"""Compiling grammars: cached, off the caller's thread, limited in time, refused in one sentence."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.engines.own.sampling import GrammarCompiler, GrammarError
from tokenmill_worker.engines.own.sampling.grammar.process import CompileLimits
from tokenmill_worker.engines.own.sampling.grammar.sources import MAX_SOURCE_CHARS, source_of

VOCAB = [bytes([i]) for i in range(256)] + [b""]
TAG: dict[str, object] = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "type": "tag",
                "begin": "<f=a>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</f>",
            }
        ],
    },
}


def nested(depth: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}}
    return found


class Slow:
    """A compiler that blocks until the test releases it; "bad" sources fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def gate(self, source: str) -> threading.Event:
        return self.gates.setdefault(source, threading.Event())

    def __call__(self, kind: str, source: str) -> str:
        self.calls.append(source)
        if source.startswith("slow"):
            self.gate(source).wait(60)
        if source.startswith("bad"):
            raise RuntimeError("[01:02:03] /project/cpp/x.cc:12: it is bad\nand more")
        return f"{kind}:{source}"


def make(slow: Slow, **options: object) -> GrammarCompiler:
    limits = CompileLimits(**options)  # type: ignore[arg-type]
    return GrammarCompiler(None, compile_source=slow, limits=limits)


@pytest.fixture(scope="module")
def bytewise() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler.from_vocab(VOCAB, [256])
    yield compiler
    compiler.close()


def regex(source: str) -> ResponseFormat:
    return ResponseFormat(regex=source)


def test_equal_grammars_are_compiled_once_and_the_recent_are_kept() -> None:
    slow = Slow()
    compiler = make(slow, cached=2)
    for source in ("a", "a", "b", "a", "c", "a", "b"):
        assert compiler.compile(regex(source)).result(60) == f"regex:{source}"
    assert slow.calls == ["a", "b", "c", "b"]


def test_concurrent_requests_share_one_compilation() -> None:
    slow = Slow()
    compiler = make(slow)
    futures = [compiler.compile(regex("slow")) for _ in range(5)]
    assert not any(future.done() for future in futures)
    slow.gate("slow").set()
    assert {future.result(60) for future in futures} == {"regex:slow"}
    assert slow.calls == ["slow"]


def test_a_failed_compilation_is_one_sentence_and_not_cached() -> None:
    slow = Slow()
    compiler = make(slow)
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"^it is bad$"):
            compiler.compile(regex("bad")).result(60)
    assert slow.calls == ["bad", "bad"]


def test_the_grammar_cache_is_bounded_by_characters() -> None:
    slow = Slow()
    compiler = make(slow, cached_chars=1_000)
    for source in ("a" * 600, "b" * 300, "b" * 300, "c" * 600, "b" * 300, "a" * 600):
        compiler.compile(regex(source)).result(60)
    assert [source[0] for source in slow.calls] == ["a", "b", "c", "a"]


def test_a_tenant_compiles_at_most_its_number_of_grammars_at_once() -> None:
    slow = Slow()
    compiler = make(slow, threads=3, threads_each=2)
    futures = [compiler.compile(regex(f"slow {i}")) for i in range(4)]
    deadline = time.monotonic() + 60
    while len(slow.calls) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.05)  # for a third, which must not come
    assert sorted(slow.calls) == ["slow 0", "slow 1"]
    for i in range(4):
        slow.gate(f"slow {i}").set()
    assert not wait(futures, 60).not_done


def test_parameters_without_a_format_need_no_preparation() -> None:
    compiler = make(Slow())
    assert compiler.prepare(SamplingParams()) is None
    future = compiler.prepare(SamplingParams(response_format=regex("a")))
    assert future is not None
    assert future.result(60) == "regex:a"


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (ResponseFormat(), "exactly one"),
        (ResponseFormat(regex="a", grammar="b"), "exactly one"),
        (ResponseFormat(regex=""), "empty"),
        (ResponseFormat(regex="a" * (MAX_SOURCE_CHARS + 1)), "limit"),
    ],
)
def test_invalid_formats_are_refused_before_compilation(
    wanted: ResponseFormat, problem: str
) -> None:
    with pytest.raises(GrammarError, match=problem):
        make(Slow()).compile(wanted).result(60)


@pytest.mark.parametrize(
    "wanted",
    [
        ResponseFormat(regex="[a-z"),
        ResponseFormat(grammar='root ::= "a" | nowhere'),
        ResponseFormat(grammar="not a grammar"),
        ResponseFormat(json_schema={"type": "nonsense"}),
        ResponseFormat(json_schema={"$ref": "#/definitions/nowhere"}),
        ResponseFormat(json_schema={"type": "array", "uniqueItems": True}),
        ResponseFormat(regex="(" * 50_000 + "a" + ")" * 50_000),
        # recursion without an end, and what admits no text at all
        ResponseFormat(grammar="root ::= root"),
        ResponseFormat(grammar="root ::= root | root root"),
        ResponseFormat(grammar="root ::= a\na ::= b\nb ::= a"),
        ResponseFormat(regex=r"[^\x00-\U0010ffff]"),
        ResponseFormat(json_schema={"$ref": "#"}),
        ResponseFormat(json_schema={"$ref": "#"}, strict=False),
        ResponseFormat(json_schema={"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
        ResponseFormat(
            json_schema={"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
        ),
        ResponseFormat(json_schema={"type": "array", "items": {"const": 1}, "minItems": 10**9}),
        ResponseFormat(
            structural_tag={**TAG, "format": {"type": "json_schema", "json_schema": {"$ref": "#"}}}
        ),
        ResponseFormat(json_schema=nested(900)),
        ResponseFormat(structural_tag={**TAG, "format": nested(900)}),
        # what takes long to begin, many times over with many choices
        ResponseFormat(
            grammar="root ::= a0\n"
            + "\n".join(f"a{i} ::= a{i + 1}" for i in range(9_000))
            + '\na9000 ::= "x"'
        ),
    ],
)
def test_grammars_that_the_library_refuses_are_errors_of_one_sentence(
    bytewise: GrammarCompiler, wanted: ResponseFormat
) -> None:
    error = bytewise.compile(wanted).exception(60)
    assert isinstance(error, GrammarError)
    assert error.code == "invalid_request"
    assert 10 < len(str(error)) < 300
    assert "/project" not in str(error)
    assert "\n" not in str(error)


def test_equal_schemas_have_one_source() -> None:
    assert source_of(ResponseFormat(json_schema={})) == source_of(
        ResponseFormat(json_schema={"type": "object"})
    )


def test_the_vocabulary_is_read_before_the_first_grammar() -> None:
    compiler = GrammarCompiler.from_vocab(VOCAB, [256])

    class Unreadable:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"{name} of the vocabulary is read for a grammar")

    compiler.tokenizer_info = Unreadable()
    for wanted in (regex("1"), ResponseFormat(json_schema={"const": 1})):
        assert compiler.compile(wanted).result(60)().accept_token(ord("1"))


def is_allowed(compiler: GrammarCompiler, wanted: ResponseFormat, answer: str) -> bool:
    matcher = compiler.compile(wanted).result(60)()
    return all(matcher.accept_token(byte) for byte in answer.encode()) and bool(
        matcher.accept_token(256)
    )


def test_structural_tags_bind_text_behind_their_triggers(bytewise: GrammarCompiler) -> None:
    wanted = ResponseFormat(structural_tag=TAG)
    answers = (
        "No tag.",
        "One: <f=a>7</f>, two: <f=a>8</f>.",
        '<f=a>"7"</f>',
        "<f=b>7</f>",
        "<f=a>",
    )
    found = [is_allowed(bytewise, wanted, answer) for answer in answers]
    assert found == [True, True, False, False, False]


def test_an_invalid_structural_tag_is_refused(bytewise: GrammarCompiler) -> None:
    none: list[dict[str, object]] = [{}, {"type": "structural_tag"}, {**TAG, "format": {"a": 1}}]
    for tag in none:
        with pytest.raises(GrammarError, match=r"^response_format\.structural_tag cannot be"):
            bytewise.compile(ResponseFormat(structural_tag=tag)).result(60)


def test_a_choice_is_a_grammar_of_its_texts(bytewise: GrammarCompiler) -> None:
    from tokenmill.openai.forms import read_forms

    texts = ('a "b"', "c\\d\n", "ü☁", "ab")
    fields = {"response_format": {"choice": texts}}
    read_forms(fields)
    wanted = ResponseFormat(**fields["response_format"])  # type: ignore[arg-type]
    assert all(is_allowed(bytewise, wanted, text) for text in texts)
    assert not any(is_allowed(bytewise, wanted, text) for text in ("", "a", "abc", "ü"))
