"""The page of errors names every code that a user can receive; its sentences are in the source."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenmill
from tokenmill.errors import TokenmillError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ops" / "guides" / "errors.md").read_text(encoding="utf-8")
PACKAGES = ("api_client/tokenmill", "schemas/tokenmill_schemas", "worker/tokenmill_worker")
CODE = re.compile(r"[a-z]+(_[a-z]+)*")
GAP = "…"


@functools.cache
def modules() -> list[ast.Module]:
    """Return all modules of the packages, parsed when the first test asks for them."""
    return [
        ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    ]


def carriers() -> dict[str, tuple[int, str | None]]:
    """Return, for each class that has a code, the place of the code and its default.

    A class has a code if its fields or the arguments of its `__init__` have the name `code`.
    """
    found = {}
    for module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                names, default = parameters(node)
                if "code" in names:
                    found[node.name] = (names.index("code"), default)
    return found


def parameters(node: ast.ClassDef) -> tuple[list[str], str | None]:
    """Return the names of a class's arguments, and the default of `code`."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            names = [argument.arg for argument in item.args.args[1:]]
            defaults = dict(zip(reversed(names), reversed(item.args.defaults), strict=False))
            return names, text_of(defaults.get("code"))
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return [ast.unparse(field.target) for field in fields], None


def text_of(node: ast.AST | None) -> str | None:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if is_text else None  # type: ignore[union-attr]


def constants() -> dict[str, str]:
    """Return the texts that modules assign to a name in capitals."""
    found = {}
    for module in modules():
        for node in module.body:
            target = (
                node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            )
            text = text_of(getattr(node, "value", None))
            if isinstance(target, ast.Name) and target.id.isupper() and text is not None:
                found[target.id] = text
    return found


def codes() -> set[str]:
    """Return every code that the source puts into an error."""
    classes, named = carriers(), constants()
    found = {default for _, default in classes.values() if default}
    for module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Call):
                found |= set(codes_of(node, classes, named))
    return {code for code in found if CODE.fullmatch(code)}


def codes_of(
    call: ast.Call, classes: dict[str, tuple[int, str | None]], named: dict[str, str]
) -> Iterator[str]:
    given = [word.value for word in call.keywords if word.arg in ("code", "error_code")]
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in classes:
        place = classes[name][0]
        given += call.args[place : place + 1]
    for value in given:
        text = named.get(value.id) if isinstance(value, ast.Name) else text_of(value)
        if text is not None:
            yield text


@functools.cache
def sentences() -> list[str]:
    """Return the texts of the source; what a format string inserts is a gap."""
    found = []
    for module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.JoinedStr):
                parts = [text_of(part) for part in node.values]
                found.append("".join(GAP if part is None else part for part in parts))
            elif (text := text_of(node)) is not None:
                found.append(text)
    return found


def test_every_error_code_is_on_the_page() -> None:
    found = codes()
    assert {"invalid_request", "dead", "schema_violation", "model_not_found"} <= found
    assert {"duplicate_custom_id", "batch_expired", "empty_file", "invalid_value"} <= found
    assert {code for code in found if f"`{code}`" not in PAGE} == set()


def test_every_exception_of_the_client_is_on_the_page() -> None:
    names = {
        name
        for name in tokenmill.__all__
        if isinstance(getattr(tokenmill, name), type)
        and issubclass(getattr(tokenmill, name), TokenmillError)
    }
    names -= {"TokenmillError", "QueueRefusal"}  # the bases of others
    assert {name for name in names if f"`{name}`" not in PAGE} == set()


def quoted() -> list[str]:
    """Return the sentences of the page's tables: texts in code style with a space or a gap."""
    tables = "\n".join(line for line in PAGE.splitlines() if line.startswith("| "))
    texts = re.findall(r"`([^`]+)`", tables)
    return [
        text
        for text in texts
        if " " in text and not re.match(r"(tokenmill|maxmemory|INVALID|Error:)", text)
    ]


@pytest.mark.parametrize("sentence", quoted())
def test_every_quoted_sentence_is_in_the_source(sentence: str) -> None:
    parts = [part for part in sentence.split(GAP) if part.strip()]
    pattern = re.compile(".*".join(re.escape(part) for part in parts), re.DOTALL)
    assert any(pattern.search(text) for text in sentences()), "it was changed or removed"


def test_a_sentence_that_is_not_in_the_source_is_detected() -> None:
    assert not any("the moon is made of cheese" in text for text in sentences())
    assert len(quoted()) >= 50


# errors of which every sentence is on the page, unless it says by itself what to do
COMPLETE = {
    "ConfigurationError", "QueueUnavailable", "JobNotFound", "BatchNotFound", "UnreadableRecord",
    "SettingsError", "EngineConfigError", "ModelNotFoundError", "ModelUnusableError",
    "StoreUnavailable", "RedisUnavailable",
}  # fmt: skip
EXPLAINED_BY_ITSELF = (
    "--metadata must be KEY=VALUE", "--port must be", "--redis-url: this command",
    "a batch may have 16 entries", "a completion window is", "a day is written",
    "a time is written", "a webhook is …", "a webhook secret is …", "an import of a bulk file",
    "cpu_offload_gib", "is not a device that torch knows", "give --json or --csv",
    "metadata: keys may have", "model option …", "reasoning_format …",
    "has an option that cannot be: …",
    "the database URL cannot be read: ", "the in-memory queue needs fakeredis",
    "the last part of a Sentinel URL", "there is no file …", "there is no folder …: make it",
    "usage cannot be grouped by", "… cannot be used: …", "name another file for the errors",
    "is a directory: name a file", "name another",
)  # fmt: skip


def raised() -> set[str]:
    """Return the sentences with which the source makes one of these errors."""
    found = set()
    for module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in COMPLETE:
                for value in node.args:
                    items = value.elts if isinstance(value, ast.List) else [value]
                    found |= {text for item in items if " " in (text := sentence_of(item))}
    return found


def sentence_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(GAP if (text := text_of(part)) is None else text for part in node.values)
    return text_of(node) or ""


def test_every_sentence_of_the_listed_errors_is_on_the_page() -> None:
    patterns = [
        re.compile(".*".join(map(re.escape, filter(str.strip, sentence.split(GAP)))), re.DOTALL)
        for sentence in quoted()
    ]
    sentences = raised()
    assert len(sentences) >= 60
    missing = {
        sentence
        for sentence in sentences - {f"{GAP}: {GAP}"}
        if not any(pattern.search(sentence) for pattern in patterns)
    }
    excused = {text for text in missing if any(part in text for part in EXPLAINED_BY_ITSELF)}
    assert missing - excused == set()
    stale = [p for p in EXPLAINED_BY_ITSELF if not any(p in text for text in missing)]
    assert stale == [], "the page or the source has changed"
