"""Signatures of webhooks against the published example of Standard Webhooks, and what a receiver
must refuse.
"""

import hmac
import re
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tokenmill.errors import ConfigurationError
from tokenmill.webhooks import BadSignature, new_secret, sign, tenant_secret, verify
from tokenmill_schemas import JobStatus
from tokenmill_schemas.webhook import WebhookEvent, WebhookJob

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NOW = 1_700_000_000


def message(
    secret: str = SECRET, *, sent: int = NOW, body: bytes | None = None
) -> tuple[bytes, dict[str, str]]:
    data = WebhookJob(
        job_id="j", status=JobStatus.SUCCEEDED, queue="q", model="m", tenant="", choices=None,
        usage=None, error=None,
        attempt=1, created_ms=0, started_ms=0, finished_ms=1, metadata={},
    )  # fmt: skip
    event = WebhookEvent(type="job.succeeded", timestamp="1970-01-01T00:00:00Z", data=data)
    body = msgspec.json.encode(event) if body is None else body
    headers = {
        "Webhook-Id": "msg_1",
        "Webhook-Timestamp": str(sent),
        "Webhook-Signature": sign("msg_1", sent, body, secret),
    }
    return body, headers


def test_the_signature_equals_the_published_example() -> None:
    signature = sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}', SECRET)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_signed_body_is_verified_and_decoded() -> None:
    body, headers = message()
    assert verify(body, headers, SECRET, now=NOW + 200).data.job_id == "j"


@pytest.mark.parametrize("late_s", [301, -301])
def test_an_old_message_is_refused(late_s: int) -> None:
    body, headers = message()
    with pytest.raises(BadSignature, match="tolerated"):
        verify(body, headers, SECRET, now=NOW + late_s)


@pytest.mark.parametrize("name", ["Webhook-Id", "Webhook-Timestamp", "Webhook-Signature"])
def test_a_change_of_any_signed_part_is_refused(name: str) -> None:
    body, headers = message()
    with pytest.raises(BadSignature, match="has no"):
        verify(body, {key: value for key, value in headers.items() if key != name}, SECRET, now=NOW)
    changed = {**headers, name: {"Webhook-Timestamp": str(NOW + 1)}.get(name, "v1,other")}
    with pytest.raises(BadSignature, match="no signature"):
        verify(body, changed, SECRET, now=NOW)


def test_a_changed_body_and_a_foreign_secret_are_refused() -> None:
    body, headers = message()
    with pytest.raises(BadSignature, match="no signature"):
        verify(body.replace(b'"j"', b'"k"'), headers, SECRET, now=NOW)
    with pytest.raises(BadSignature, match="no signature"):
        verify(body, headers, new_secret(), now=NOW)


@pytest.mark.parametrize(("num_others", "is_found"), [(15, True), (16, False), (100_000, False)])
def test_a_valid_signature_is_found_among_the_first_sixteen(
    num_others: int, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    compare = hmac.compare_digest

    def count(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", count)
    body, headers = message()
    signatures = " ".join(["v1,other"] * num_others + [headers["Webhook-Signature"]])
    try:
        verify(body, {**headers, "Webhook-Signature": signatures}, SECRET, now=NOW)
    except BadSignature:
        assert not is_found
    else:
        assert is_found
    assert len(compared) == 16


@pytest.mark.parametrize("stamp", ["", "soon", "-1", "١", "1e9", "9" * 400, "9" * 5000])
def test_an_invalid_timestamp_is_refused(stamp: str) -> None:
    body, headers = message()
    with pytest.raises(BadSignature):
        verify(body, {**headers, "Webhook-Timestamp": stamp}, SECRET, now=NOW)


def test_a_secret_can_be_rotated_without_a_refused_webhook() -> None:
    old, new = SECRET, new_secret()
    body, headers = message(f"{new} {old}")
    for receivers in (old, new, f"{old} {new}"):
        assert verify(body, headers, receivers, now=NOW)


def test_each_tenant_has_its_own_secret() -> None:
    ours, theirs = tenant_secret(SECRET, "acme"), tenant_secret(SECRET, "other")
    assert tenant_secret(SECRET, "") == SECRET
    body, headers = message(ours)
    assert verify(body, headers, tenant_secret(SECRET, "acme"), now=NOW)
    for secret in (theirs, SECRET):
        with pytest.raises(BadSignature):
            verify(body, headers, secret, now=NOW)


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_c2hvcnQ=", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_*"]
)
def test_an_invalid_secret_is_refused(secret: str) -> None:
    with pytest.raises(ConfigurationError):
        sign("a", 1, b"", secret)


def test_a_signed_body_that_is_no_webhook_is_refused() -> None:
    body, headers = message(body=b"[1]")
    with pytest.raises(BadSignature, match="cannot be read"):
        verify(body, headers, SECRET, now=NOW)


def test_the_guide_s_receiver_runs() -> None:
    guide = (Path(__file__).parents[3] / "ops" / "guides" / "celery.md").read_text(encoding="utf-8")
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
        if "webhooks.verify" in block
    )
    stored: list[str] = []
    for secret in (SECRET, new_secret()):
        body, headers = message(secret, sent=round(time.time()))
        names = {
            "body": body,
            "request": SimpleNamespace(headers={k.lower(): v for k, v in headers.items()}),
            "SECRET": SECRET, "first_time": {"msg_1"}.__contains__, "store": lambda job,
            _choices: stored.append(job),
        }  # fmt: skip
        if secret == SECRET:
            exec(code, names)
        else:
            with pytest.raises(BadSignature):
                exec(code, names)
    assert stored == ["j"]
