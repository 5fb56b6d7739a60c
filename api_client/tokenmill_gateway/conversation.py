"""Holds what the API shows of a response's request, and joins the turns of a conversation."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tokenmill.errors import TokenmillError, readable
from tokenmill.openai.parameters import SESSION
from tokenmill.openai.response_object import response_of
from tokenmill_gateway.keys import ApiKey
from tokenmill_gateway.queues import job_id_of
from tokenmill_gateway.records import MOST_TURNS, Recorded, Records
from tokenmill_gateway.refusals import HttpRefusal, refused_by_client
from tokenmill_gateway.threads import in_thread

PREFIX: Final = "resp_"


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a response's request that the API shows. It travels with the job, and is
    recorded with its result.
    """

    model: str
    repeated: dict[str, Any]  # members of the response
    input: list[Any]  # the new items


_envelope_decoder: Final = msgspec.json.Decoder(Envelope)


def opened(envelope: bytes, job_id: str) -> Envelope:
    with readable(f"the request of job {job_id}"):
        return _envelope_decoder.decode(envelope)


async def conversation(records: Records, key: ApiKey, previous: object) -> tuple[list[Any], str]:
    """Return the items of all turns up to a response, and the session: the newest prompt_cache_key,
    or else the first turn's id. Raises HttpRefusal.
    """
    if not isinstance(previous, str):
        words = "previous_response_id must be a text"
        raise HttpRefusal.of(400, "invalid_value", words, "previous_response_id")
    try:
        turns = await records.chain(job_id_of(previous, PREFIX), key.tenant)
    except HttpRefusal:
        turns = []
    except TokenmillError as error:
        raise refused_by_client(error) from error
    if not turns or not turns[0].envelope:
        words = f"there is no stored response {previous[:64]!r} that has ended"
        raise HttpRefusal.of(400, "previous_response_not_found", words, "previous_response_id")
    if len(turns) > MOST_TURNS:
        words = f"a conversation may have {MOST_TURNS} turns"
        raise HttpRefusal.of(400, "invalid_value", words, "previous_response_id")
    if turns[-1].previous_id:
        raise _gone(turns[-1].previous_id)
    return await in_thread(lambda: _joined(turns))


def _joined(turns: list[Recorded]) -> tuple[list[Any], str]:
    """Raises HttpRefusal if the input or the output of a turn is gone."""
    items: list[Any] = []
    session = turns[-1].job_id
    for turn in reversed(turns):
        if not turn.envelope or turn.result is None:
            raise _gone(turn.job_id)
        envelope = opened(turn.envelope, turn.job_id)
        items += [*envelope.input, *msgspec.to_builtins(response_of(turn.result).output)]
        session = envelope.repeated.get(SESSION) or session
    return items, session


def _gone(job_id: str) -> HttpRefusal:
    words = f"the turn {PREFIX}{job_id} before it is gone"
    return HttpRefusal.of(400, "previous_response_not_found", words, "previous_response_id")


def shown_item(item: Any, item_id: str) -> dict[str, Any]:
    """Return an input item with the members that the API always shows."""
    if (item.get("type") or "message") != "message":
        return {"status": "completed", **item, "id": item_id}
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        extra: dict[str, object] = (
            {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        )
        content = [{"type": kind, "text": content, **extra}]
    return {
        "status": "completed", **item, "id": item_id, "type": "message", "content": content,
    }  # fmt: skip
