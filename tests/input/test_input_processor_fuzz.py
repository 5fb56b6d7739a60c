"""The worker's intake answers arbitrary bytes, without the safety net behind its checks."""

import msgpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.publish.support import CREATED_MS, MODEL, Clock
from tests.support.tokenizers import byte_level
from tokenmill_schemas.chat import Message
from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob

FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])

NUMBERS = (
    st.integers(-(2**63), 2**64 - 1) | st.floats() | st.sampled_from([0, 1, -1, 4096, 2**31, 2**53])
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | NUMBERS, inner, max_size=3)
    ),
    max_leaves=6,
)
PARAMS = st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), VALUES, max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text()}),
    max_size=3,
)
REQUESTS = st.fixed_dictionaries(
    {"job_id": st.just("job")},
    optional={
        name: VALUES for name in JobRequest.__struct_fields__ if name not in ("job_id", "params")
    }
    | {"prompt": st.text(), "messages": MESSAGES, "params": PARAMS},
)
VERDICTS = st.sampled_from(["run", "run", "run", "cancelled", "expired", "dead"])
WHOLE = encode(
    JobRequest(
        job_id="job", messages=(Message("user", "Why?"),), metadata={"a": "b"},
        deadline_ms=CREATED_MS * 2,
        params=SamplingParams(max_tokens=9, stop=("x",), logit_bias={3: 1.0}, n=2, seed=1,
                              temperature=0.5),
    )
)  # fmt: skip


async def admit(
    payload: bytes, delivery_outcome: str = "run", log: tuple[bytes, ...] = ()
) -> AdmittedJob | FinishedJob:
    delivery = Delivery(
        job_id="job", token=1, payload=payload, deliveries=1, crashes=0, log=log,
        outcome=delivery_outcome,  # type: ignore[arg-type]
        created_ms=CREATED_MS, started_ms=CREATED_MS, attempt=1,
    )  # fmt: skip
    outcome = InputProcessor(byte_level(), MODEL, clock=Clock()).process(delivery)
    if isinstance(outcome, FinishedJob):
        result = outcome.result
        assert result.status.is_final
        assert result.error is None or result.error.code != "internal_error", result.error
        encode(result), encode(outcome.final_chunk)
    else:
        assert 0 < len(outcome.generation.prompt.token_ids) < MODEL.max_model_len
        encode(outcome.generation)
    return outcome


@given(st.binary(max_size=60), VERDICTS)
@FUZZ
async def test_any_payload_bytes_give_a_request_or_a_refusal(payload, delivery_outcome):
    await admit(payload, delivery_outcome)


@given(REQUESTS, VERDICTS)
@FUZZ
async def test_requests_with_any_values_give_a_request_or_a_refusal(fields, delivery_outcome):
    await admit(msgpack.packb(fields, unicode_errors="surrogatepass"), delivery_outcome)


@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(WHOLE)),
)
@FUZZ
async def test_a_good_request_with_changed_or_cut_bytes_gives_a_request_or_a_refusal(
    changes, length
):
    payload = bytearray(WHOLE)
    for position, byte in changes:
        payload[position] = byte
    await admit(bytes(payload[: length or None]))


@given(st.lists(st.binary(max_size=30) | VALUES.map(msgpack.packb), max_size=3), VERDICTS)
@FUZZ
async def test_logs_of_any_bytes_give_a_request_or_a_refusal(log, delivery_outcome):
    await admit(WHOLE, delivery_outcome, tuple(log))


async def test_the_unchanged_request_of_the_fuzz_tests_is_accepted():
    assert isinstance(await admit(WHOLE), AdmittedJob)
