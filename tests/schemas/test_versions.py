"""A request says which version of the wire its fields need; an older worker refuses it with a
sentence and never leaves such a field out.
"""

import json

import pytest

from tests.schemas.recording import FOLDER
from tests.schemas.samples import REQUEST
from tokenmill.operations.submit import build_request
from tokenmill_schemas.codec import decode_request, encode
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import ADDED_IN, SCHEMA_VERSION, JobRequest, wire_version
from tokenmill_schemas.validation import problems

RELEASED = {"params.echo": 2, "documents": 3}  # as if later versions had added these


@pytest.mark.parametrize(
    ("request_", "version"),
    [
        (JobRequest(job_id="a", prompt="x", v=2), 1),
        (JobRequest(job_id="a", prompt="x", params=SamplingParams(seed=1)), 1),
        (JobRequest(job_id="a", prompt="x", params=SamplingParams(echo=True)), 2),
        (JobRequest(job_id="a", documents=({"title": "T"},)), 3),
        (REQUEST, 3),
    ],
    ids=["v is ignored", "an old parameter", "a newer parameter", "a newer field", "both"],
)
def test_a_request_needs_the_version_of_its_newest_field(
    request_: JobRequest, version: int
) -> None:
    assert wire_version(request_, RELEASED) == version


def test_a_request_of_version_1_is_encoded_without_its_version() -> None:
    request = build_request({"prompt": "x"})
    assert request.v == 1
    assert b"\xa1v" not in encode(request)


def test_a_request_of_a_newer_version_is_refused_with_both_versions() -> None:
    newer = SCHEMA_VERSION + 1
    request = decode_request(encode(JobRequest(job_id="a", prompt="x", v=newer)))
    assert problems(request) == [
        f"the request needs version {newer} of the wire format; this side reads up to version "
        f"{SCHEMA_VERSION}: update it"
    ]


def test_every_field_that_recording_1_lacks_has_the_version_that_added_it() -> None:
    """Workers of version 1 would leave it out."""
    known = json.loads((FOLDER / "1" / "values.json").read_text(encoding="utf-8"))["request"]
    params = set(SamplingParams.__struct_fields__) - set(known["params"])
    # other forms of the recording's `messages`
    fields = set(JobRequest.__struct_fields__) - set(known) - {"prompt", "prompt_ids", "v"}
    added = {f"params.{name}" for name in params} | fields
    assert added == set(ADDED_IN), (
        "before the release, record version 1 anew; after it, name the field in ADDED_IN"
    )
    assert all(1 < version <= SCHEMA_VERSION for version in ADDED_IN.values())
