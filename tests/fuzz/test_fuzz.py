"""A short form of `ops/fuzz`: each target in this process, without coverage; and the bombs,
refused one by one.
"""

import faulthandler
import subprocess
import sys

import msgpack
import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.driver import Finding, run_seeded
from tests.fuzz.mutation import pack
from tests.fuzz.targets import Target, targets
from tokenmill_schemas.codec import DecodeError, decode_request, encode
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.size_limits import HARMLESS_BYTES

ALL = targets()
INPUTS = 500


@pytest.mark.parametrize("name", ALL)
def test_fuzz_targets_raise_only_documented_errors(name):
    target = ALL[name]
    report = run_seeded(target, INPUTS * target.share // 4, seed=1)
    assert report.read > 0
    assert report.refused > 0 or not target.documented


@pytest.mark.parametrize("name", ALL)
def test_every_seed_is_accepted_by_its_target(name):
    target = ALL[name]
    assert all(target.try_one(seed) for seed in target.seeds)


def test_an_undocumented_error_is_a_finding(monkeypatch):
    """The watchdog ends with the run: it would end this process later."""
    cancelled = []
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: cancelled.append(1))

    def fragile(data: bytes) -> None:
        if msgpack.unpackb(data)["n"] == 2**53:
            raise ZeroDivisionError

    documented = (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException)
    with pytest.raises(Finding):
        run_seeded(
            Target("fragile", fragile, [msgpack.packb({"n": 1})], documented), 20_000, seed=1
        )
    monkeypatch.undo()
    faulthandler.cancel_dump_traceback_later()
    assert cancelled


def test_the_command_prints_a_line_per_target():
    command = [sys.executable, "-m", "tests.fuzz", "--plain", "--inputs", "40", "--target", "url"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "40 inputs" in done.stdout
    assert "findings: 0" in done.stdout


def test_an_unknown_target_is_named(capsys):
    assert main(["--target", "nothing"]) == 2
    assert "no target nothing" in capsys.readouterr().err


# ── bombs ──


def array(count: int, element: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + element * count


def nested(*names: str, inside: bytes) -> bytes:
    for name in reversed(names):
        inside = b"\x81" + pack(name) + inside
    return inside


def request_with(name: str, packed: bytes) -> bytes:
    return b"\x83" + pack("job_id") + b"\xa1x" + pack("prompt") + b"\xa2hi" + pack(name) + packed


MANY = 2_500_000
EMPTY_LISTS = nested("response_format", "json_schema", "a", inside=array(MANY, b"\x90"))
BOMBS = {
    "schema": (
        request_with("params", EMPTY_LISTS),
        f"json_schema may have 262144 bytes, not {MANY + 8}",
    ),
    "bias": (
        request_with("params", msgpack.packb({"logit_bias": dict.fromkeys(range(300_000), 0.0)})),
        "logit_bias may have 1024 entries, not 300000",
    ),
    "stop": (
        request_with("params", nested("stop", inside=array(MANY, b"\xa0"))),
        f"16 strings, not {MANY}",
    ),
    "ids": (
        request_with("params", nested("stop_token_ids", inside=array(MANY, b"\x05"))),
        f"1024 ids, not {MANY}",
    ),
    "words": (
        request_with("params", nested("bad_words_ids", inside=array(MANY, b"\x90"))),
        "bad_words_ids may have 262144 bytes",
    ),
    "suppressed": (
        request_with("params", nested("suppress_tokens", inside=array(MANY, b"\x05"))),
        "suppress_tokens may have 262144 bytes",
    ),
    "metadata": (request_with("metadata", array(MANY, b"\x90")), f"64 entries, not {MANY}"),
    "prompt": (request_with("prompt_ids", array(MANY, b"\x05")), f"2000000 ids, not {MANY}"),
    "messages": (request_with("messages", array(MANY, b"\x80")), f"10000 entries, not {MANY}"),
    "depth": (request_with("metadata", b"\x81\xa1a" * MANY + b"\xc0"), "recursion"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_with_a_sentence_before_it_is_decoded(name):
    payload, sentence = BOMBS[name]
    with pytest.raises(DecodeError, match=sentence):
        decode_request(payload)


def test_a_large_field_repeated_by_a_harmless_one_of_the_same_name_is_not_built():
    # The last field of a name counts; were the first one built, this would take half a gigabyte.
    twice = (
        b"\x82" + b"\xabjson_schema" + b"\x81\xa1a" + array(MANY, b"\x90") + b"\xabjson_schema\x80"
    )
    request = decode_request(request_with("params", nested("response_format", inside=twice)))
    assert request.params.response_format is not None
    assert request.params.response_format.json_schema == {}


def test_a_large_request_is_decoded_whole():
    request = JobRequest(job_id="x", prompt="a" * HARMLESS_BYTES * 2, metadata={"a": "b"})
    assert decode_request(encode(request)) == request
    unknown = msgpack.packb(
        {"job_id": "x", "prompt": "a" * HARMLESS_BYTES, "future": [1], "params": {"later": {}}}
    )
    assert decode_request(unknown).job_id == "x"
