"""What goes wrong in a step or at the door, in words and kinds. It decides nothing."""

from __future__ import annotations

from schemas.generation import FinishReason
from worker.engine.types import RequestError, TokenEvent


class EngineError(RuntimeError):
    """The engine itself is broken, as when its device is lost: it must be restarted, and no request fails for it."""


class StepsFailError(EngineError):
    """Steps fail whatever they hold: memory or disk is gone, or the model gives no finite logits."""


def refusal_event(request_id: str, error: RequestError, choice: int = 0) -> TokenEvent:
    return TokenEvent(
        request_id=request_id,
        choice=choice,
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_code=error.code,
    )


def why(error: BaseException) -> str:
    """The words of an error; of one that is not ours its class as well, since such words alone may say nothing."""
    is_ours = type(error).__module__.startswith("worker.") and str(error)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"


def sentence_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


SIGNS_OF_LOSS = (
    "device-side assert", "illegal memory access", "misaligned address", "illegal instruction",
    "invalid program counter", "hardware stack error", "unspecified launch failure", "launch timed out",
    "cuda error: unknown error", "cublas_status_execution_failed", "ecc error", "nvlink error", "device lost",
    "failed in a step",
)  # fmt: skip


def is_device_lost(error: Exception) -> bool:
    """After a device-side assert or an illegal access every later call on the device fails too; and a group of ranks
    of which one has failed inside a step runs no other step. What no sign names, the device has to be asked."""
    text = str(error).lower()
    return any(sign in text for sign in SIGNS_OF_LOSS)
