"""What goes wrong in a step or at the door, in words and kinds. It decides nothing."""

from __future__ import annotations

from schemas.generation import FinishReason
from worker.engine.types import RequestError, TokenEvent


def refusal_event(request_id: str, error: RequestError, choice: int = 0) -> TokenEvent:
    return TokenEvent(
        request_id=request_id,
        choice=choice,
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_code=error.code,
    )


def sentence_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_device_lost(error: Exception) -> bool:
    """After a device-side assert or an illegal access every later call on the device fails too; and a group of ranks
    of which one has failed inside a step runs no other step."""
    text = str(error).lower()
    signs = ("device-side assert", "illegal memory access", "unspecified launch failure", "device lost", "ecc error",
             "failed in a step")  # fmt: skip
    return any(sign in text for sign in signs)
