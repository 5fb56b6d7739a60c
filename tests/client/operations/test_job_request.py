"""Requests, ids, fingerprints and URLs: what is decided before anything is sent."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tokenmill import ConfigurationError, InvalidRequest
from tokenmill.operations.submit import (
    JobHandle,
    build_request,
    estimated_tokens,
    fingerprint,
    new_job_id,
)
from tokenmill.transport.connect import parse_url
from tokenmill_schemas.codec import decode_request, encode
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest, Priority


def test_each_argument_sets_its_field_of_the_request() -> None:
    request = build_request(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 5,
            "temperature": 0,
            "stop": "x",
            "logit_bias": {5: 1.5},
            "response_format": ResponseFormat(regex="a+"),
            "priority": Priority.BULK,
            "tenant": "t",
            "webhook": "https://example.org/hook",
            "stream": False,
        }
    )
    assert request.params == SamplingParams(
        max_tokens=5,
        temperature=0,
        stop=("x",),
        logit_bias={5: 1.5},
        response_format=ResponseFormat(regex="a+"),
    )
    assert (request.priority, request.tenant, request.stream) == (Priority.BULK, "t", False)
    assert abs(request.created_ms - time.time() * 1000) < 60_000


def test_token_rules_are_accepted_as_json_lists() -> None:
    request = build_request(
        {
            "prompt": "x",
            "bad_words_ids": [[5, 4], [7]],
            "sequence_bias": [[[5, 4], 3.5], [[6], -2]],
            "no_repeat_ngram_size": 2,
            "suppress_tokens": [1],
            "begin_suppress_tokens": [2],
            "forced_bos_token_id": 3,
            "forced_eos_token_id": [8, 9],
        }
    )
    assert request.params == SamplingParams(
        bad_words_ids=((5, 4), (7,)),
        sequence_bias=(((5, 4), 3.5), ((6,), -2.0)),
        no_repeat_ngram_size=2,
        suppress_tokens=(1,),
        begin_suppress_tokens=(2,),
        forced_bos_token_id=3,
        forced_eos_token_id=(8, 9),
    )
    assert decode_request(encode(request)) == request


def test_times_may_be_relative_or_absolute() -> None:
    now = time.time()
    relative = build_request({"prompt": "x", "deadline": 60, "not_before": now + 5})
    assert relative.deadline_ms == relative.created_ms + 60_000
    assert relative.not_before_ms == round((now + 5) * 1000)
    moment = datetime.fromtimestamp(now + 60, UTC)
    spans = build_request({"prompt": "x", "deadline": moment, "not_before": timedelta(seconds=5)})
    assert spans.deadline_ms == round(moment.timestamp() * 1000)
    assert spans.not_before_ms == spans.created_ms + 5_000


def test_token_ids_of_a_bias_may_be_json_texts() -> None:
    plain, from_json = (
        build_request({"prompt": "x", "logit_bias": {key: 1.5}}) for key in (5, "5")
    )
    assert from_json.params.logit_bias == plain.params.logit_bias == {5: 1.5}
    assert fingerprint(from_json) == fingerprint(plain)
    for key in ("x", "5.0", " 5", 5.0, True):
        with pytest.raises(
            InvalidRequest, match="logit_bias must be a map from token ids to numbers"
        ):
            build_request({"prompt": "x", "logit_bias": {key: 1.5}})


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request({"prompt": "x", "max_tokens": 0, "temperature": -1.0})
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("name", ["deadline", "not_before"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, "soon"])
def test_an_invalid_time_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}"):
        build_request({"prompt": "x", name: value})


def test_unknown_arguments_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="max_token is neither"):
        build_request({"prompt": "x", "max_token": 3})


def test_ids_are_version_7_and_sort_by_the_order_of_calls() -> None:
    before = time.time_ns() // 1_000_000
    ids = [new_job_id() for _ in range(20_000)]  # dozens in a millisecond
    assert ids == sorted(set(ids))
    assert {(job_id[14], job_id[19] in "89ab", len(job_id)) for job_id in ids} == {("7", True, 36)}
    assert before <= int(ids[0].replace("-", "")[:12], 16) <= time.time_ns() // 1_000_000


def test_concurrent_threads_make_unique_ids() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: [new_job_id() for _ in range(1_000)], range(8)))
    assert all(ids == sorted(ids) for ids in made)
    assert len({job_id.rpartition("-")[0][:18] for ids in made for job_id in ids}) == 8_000, (
        "all but the random part"
    )


def test_a_handle_is_its_id() -> None:
    handle = JobHandle("abc", is_new=False)
    assert (handle, handle.is_new, f"{handle}", dict[str, int]({handle: 1})["abc"]) == (
        "abc",
        False,
        "abc",
        1,
    )


def test_a_handle_is_encoded_as_plain_text() -> None:
    parent = JobHandle("abc")
    request = build_request({"prompt": parent, "metadata": {"parent": parent}})
    assert decode_request(encode(request)).metadata == {"parent": "abc"}
    assert decode_request(encode(JobRequest(job_id=parent, prompt="x"))).job_id == "abc"
    with pytest.raises(InvalidRequest):
        build_request({"prompt": object()})


def test_a_fingerprint_depends_on_content_alone() -> None:
    base: dict[str, Any] = {"prompt": "x", "max_tokens": 3}
    same = [
        base,
        {**base, "deadline": 5},
        {**base, "idempotency_key": "k"},
        {**base, "traceparent": "00-1-2-03"},
    ]
    assert len({fingerprint(build_request(arguments)) for arguments in same}) == 1
    different = [
        base,
        {**base, "prompt": "y"},
        {**base, "max_tokens": 4},
        {**base, "tenant": "t"},
        {**base, "seed": 1},
    ]
    assert len({fingerprint(build_request(arguments)) for arguments in different}) == len(different)


def test_a_jobs_cost_grows_with_prompt_and_answer() -> None:
    assert estimated_tokens(build_request({"prompt_ids": [1, 2, 3], "max_tokens": 7, "n": 2})) == 17
    assert estimated_tokens(build_request({"prompt": "x" * 400, "max_tokens": 10})) == 110


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "service", "options"),
    [
        ("redis://h:1/2", "single", (), "", {}),
        ("unix:///run/redis.sock?db=1", "single", (), "", {}),
        ("redis+sentinel://a:1,b/main/3", "sentinel", (("a", 1), ("b", 26379)), "main", {"db": 3}),
        (
            "rediss+cluster://u:p%40@a:1,[::1]:2?ssl_ca_certs=/ca", "cluster",
            (("a", 1), ("::1", 2)), "",
            {"ssl": True, "username": "u", "password": "p@", "ssl_ca_certs": "/ca"},
        ),
    ],
)  # fmt: skip
def test_each_form_of_server_url_is_accepted(
    url: str, kind: str, hosts: tuple[tuple[str, int], ...], service: str, options: dict[str, Any]
) -> None:
    endpoint = parse_url(url)
    assert (endpoint.kind, endpoint.hosts, endpoint.service, endpoint.options) == (
        kind,
        hosts,
        service,
        options,
    )


@pytest.mark.parametrize(
    "url",
    ["http://h", "redis+nonsense://h", "redis+sentinel://h", "redis+sentinel://h/main/x", "redis+cluster://h/3",
     "redis+cluster://", "redis+cluster://h:port", "redis+cluster://h:²", "redis+sentinel://h/main/1/2",
     "redis://h/abc", "redis://h/1/2", "rediss://h/-1"],
)  # fmt: skip
def test_a_wrong_server_url_is_refused_in_a_sentence(url: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_url(url)
