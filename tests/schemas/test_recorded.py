"""Bytes of earlier versions keep their meaning; additions of later versions do no harm."""

from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec
import pytest

import tokenmill_schemas.chat
import tokenmill_schemas.chunk
import tokenmill_schemas.control
import tokenmill_schemas.generation
import tokenmill_schemas.job
import tokenmill_schemas.result
from tests.schemas import recording
from tests.schemas.recording import FOLDER, differences, enumerations, meaning
from tests.schemas.samples import SAMPLES
from tokenmill_schemas import codec
from tokenmill_schemas.codec import DecodeError, decode_request, encode
from tokenmill_schemas.generation import SamplingNumbers, SamplingParams
from tokenmill_schemas.job import JobRequest

VERSIONS = sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())
MODULES = (
    tokenmill_schemas.chat,
    tokenmill_schemas.chunk,
    tokenmill_schemas.control,
    tokenmill_schemas.generation,
    tokenmill_schemas.job,
    tokenmill_schemas.result,
)
DECODERS = {
    "request": codec.decode_request,
    "chunk": codec.decode_chunk,
    "result": codec.decode_result,
    "cancel": codec.decode_control,
    "drain": codec.decode_control,
    "worker": codec.decode_status,
}


def recorded(version: str) -> Iterator[tuple[str, bytes, Any]]:
    values = msgspec.json.decode((FOLDER / version / "values.json").read_bytes())
    for path in sorted((FOLDER / version).glob("*.msgpack")):
        yield path.stem, path.read_bytes(), values[path.stem]


def kind_of(name: str) -> Any:
    return SAMPLES[name][1]


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_bytes_decode_to_their_recorded_values(version):
    found = [
        line
        for name, data, meant in recorded(version)
        for line in differences(name, data, kind_of(name), meant)
    ]
    assert not found, "\n".join(found)
    assert {name for name, _, _ in recorded(version)} <= SAMPLES.keys()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_recorded_word_of_an_enumeration_exists(version):
    kept = enumerations()
    for name, words in msgspec.json.decode((FOLDER / version / "enums.json").read_bytes()).items():
        assert set(words) <= set(kept[name]), name


def test_every_field_of_every_message_is_in_a_sample():
    """A later change of the field would otherwise go unnoticed."""
    structs = {
        kind for module in MODULES for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        and kind is not msgspec.Struct
    }  # fmt: skip
    seen: dict[type, set[str]] = {kind: set() for kind in structs}

    def visit(value: object) -> None:
        if isinstance(value, msgspec.Struct):
            defaults = dict(_defaults(type(value)))
            for name in value.__struct_fields__:
                if getattr(value, name) != defaults.get(name, msgspec.NODEFAULT):
                    seen[type(value)].add(name)
                visit(getattr(value, name))
        elif isinstance(value, tuple | dict):
            for item in value.values() if isinstance(value, dict) else value:
                visit(item)

    for value, _ in SAMPLES.values():
        visit(value)
    seen[JobRequest].add("v")  # version 1 is the default
    chat = tokenmill_schemas.chat
    for kind in (chat.TextPart, chat.ToolCall, chat.Tool):
        seen[kind].add("type")  # it has one value
    unseen = {kind.__name__: set(kind.__struct_fields__) - names for kind, names in seen.items()}
    assert not {name: fields for name, fields in unseen.items() if fields}, (
        "set them in tests/schemas/samples.py"
    )


def _defaults(kind: type[msgspec.Struct]) -> Iterator[tuple[str, object]]:
    for field in msgspec.structs.fields(kind):
        default = (
            field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        )
        yield field.name, default


@pytest.mark.parametrize("name", SAMPLES)
def test_fields_added_by_later_versions_are_ignored(name):
    """Additions at every depth: unknown keys of maps, more elements of arrays that are structs."""
    value, _ = SAMPLES[name]
    decode = DECODERS[name.split("-")[0]]
    assert (
        decode(msgpack.packb(_grown(msgpack.unpackb(encode(value), strict_map_key=False)))) == value
    )


def _grown(node: Any, key: str = "") -> Any:
    if isinstance(node, dict):
        grown = {name: _grown(item, name) for name, item in node.items()}
        free = key in (
            "metadata",
            "logit_bias",
            "json_schema",
            "structural_tag",
            "properties",
            "a",
            "tenants",
            "chat_template_kwargs",
            "documents",
            "parameters",
            "schema",
            "marks",
            "words",
            "aliases",
        )  # keys of these are users'
        return grown if free else grown | {"future": {"deep": [1, None, "x"]}}
    if isinstance(node, list):
        items = [_grown(item, key) for item in node]
        is_struct = key == "logprobs" and node and isinstance(node[0], float)
        return [*items, {"future": 1}] if is_struct else items
    return node


def test_unknown_message_types_and_words_raise_decode_error():
    for decode, data in (
        (codec.decode_control, {"type": "reload"}),
        (codec.decode_chunk, {"job_id": "j", "index": 0, "status": "paused"}),
    ):
        with pytest.raises(codec.DecodeError):
            decode(msgpack.packb(data))


def test_a_parameter_sent_with_its_default_differs_from_an_absent_one():
    neutral = SamplingNumbers()._asdict()
    sent = JobRequest(job_id="a", prompt="x", params=SamplingParams(**neutral))
    silent = JobRequest(job_id="a", prompt="x")
    assert msgpack.unpackb(encode(sent))["params"] == neutral
    assert "params" not in msgpack.unpackb(encode(silent))
    assert decode_request(encode(sent)).params == sent.params
    assert decode_request(encode(silent)).params.temperature is None


# ── the check itself ──


def test_recorded_bytes_stay_when_samples_are_added(monkeypatch, tmp_path):
    monkeypatch.setattr(recording, "FOLDER", tmp_path)
    recording.main("9")
    old, values = tmp_path / "9" / "chunk.msgpack", tmp_path / "9" / "values.json"
    old.write_bytes(b"of an earlier day")
    meant = values.read_bytes()
    monkeypatch.setitem(SAMPLES, "chunk-new", SAMPLES["chunk-token"])
    recording.main("9")
    assert old.read_bytes() == b"of an earlier day"
    added = msgspec.json.decode(values.read_bytes())
    assert added.pop("chunk-new") == added["chunk-token"]
    assert added == msgspec.json.decode(meant)


def test_the_recorded_chunk_of_a_worker_without_bytes_is_kept_beside_one_with_them():
    for name, named in (("chunk", [False, False]), ("chunk-bytes", [True, True])):
        chunk = codec.decode_chunk((FOLDER / "1" / f"{name}.msgpack").read_bytes())
        assert [bool(entry.token_bytes) for entry in chunk.logprobs] == named


def test_a_log_probability_may_grow_at_its_end_and_nothing_else():
    old = {"logprobs": [[-0.5, [[72, -0.5]]]], "queue_ms": [1.0]}

    def found(**now):
        return recording._missing("chunk", old, old | now)

    assert found(logprobs=[[-0.5, [[72, -0.5]], "SA==", ["SA=="]]]) == []
    assert found(logprobs=[[-0.5, [[72, -0.75]], "SA=="]]) == [
        "chunk.logprobs[0][1][0][1] was -0.5 and is -0.75"
    ]
    assert len(found(logprobs=[[-0.5]])) == len(found(logprobs=old["logprobs"] * 2)) == 1
    assert found(queue_ms=[1.0, 2.0]) == ["chunk.queue_ms was [1.0] and is [1.0, 2.0]"]


def variant(changes: dict[str, Any], without: str = "") -> type[msgspec.Struct]:
    """JobRequest of a careless later version."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(JobRequest):
        if field.name != without:
            kind = changes.get(field.name, field.type)
            fields.append(
                (
                    field.name,
                    kind,
                    *([] if field.required else [dict(_defaults(JobRequest))[field.name]]),
                )
            )
    fields += [
        (name, kind) for name, kind in changes.items() if name not in JobRequest.__struct_fields__
    ]
    return msgspec.defstruct("JobRequest", fields, kw_only=True, omit_defaults=True)


@pytest.mark.parametrize(
    ("careless", "says"),
    [
        (variant({}, without="tenant"), "request.tenant is gone"),
        (variant({"tenant_name": str}, without="tenant"), "missing required field `tenant_name`"),
        (variant({"deadline_ms": str | None}), "Expected `str | null`, got `int`"),
        (variant({"retry": int}), "Expected `int`, got `object`"),
        (variant({"zone": str}), "missing required field `zone`"),
    ],
)
def test_a_field_removed_renamed_retyped_or_newly_required_is_detected(careless, says):
    value, _ = SAMPLES["request"]
    assert any(
        says in line for line in differences("request", encode(value), careless, meaning(value))
    )


@pytest.mark.parametrize("keys", [(5, 7), ("5", "7"), ("5", 7)])
def test_biases_with_integer_or_text_keys_are_decoded(keys):
    """Text keys are what an object of JavaScript becomes."""
    biases = dict(zip(keys, (1.5, -1), strict=True))
    packed = msgspec.msgpack.encode(
        {"job_id": "a", "prompt": "x", "params": {"logit_bias": biases}, "later": 1}
    )
    assert decode_request(packed) == JobRequest(
        job_id="a", prompt="x", params=SamplingParams(logit_bias={5: 1.5, 7: -1.0})
    )


@pytest.mark.parametrize("key", ["dog", "5.0", " 5", "", 5.5, True])
def test_biases_with_other_keys_raise_the_decoder_s_error(key):
    packed = msgspec.msgpack.encode(
        {"job_id": "a", "prompt": "x", "params": {"logit_bias": {key: 1}}}
    )
    with pytest.raises(DecodeError, match=r"`\$\.params\.logit_bias`"):
        decode_request(packed)
