"""Error classes of the engine, and the messages made from errors."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine is broken, for example because its device is lost.

    It must be restarted; no request ends with an error for it.
    """


class StepsFailError(EngineError):
    """Every step fails, whatever it holds: memory or disk is full, or no logits are finite."""


def why(error: BaseException) -> str:
    """Return the message of an error, with its class unless the class is ours.

    Messages of other libraries may be meaningless without the class.
    """
    is_ours = type(error).__module__.startswith("tokenmill_worker.") and str(error)
    return str(error) if is_ours else _named(error, _words(error))


def sentence_of(error: BaseException) -> str:
    return _named(error, _words(error).partition("\n")[0])


def lacks_memory(error: BaseException) -> bool:
    """Return whether the machine's memory was too small, or taken by others for the moment."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS_OF_NO_MEMORY)


def _named(error: BaseException, words: str) -> str:
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _words(error: BaseException) -> str:
    is_mute = isinstance(error, MemoryError) and not str(error).strip()
    return "the process gets no more memory" if is_mute else str(error).strip()


# torch's allocator, libc and the dynamic loader say it in these words, whatever class they raise
_SIGNS_OF_NO_MEMORY = (
    "cannot allocate memory", "can't allocate memory", "not enough memory", "bad_alloc",
)  # fmt: skip


SIGNS_OF_LOSS = (
    "device-side assert", "illegal memory access", "misaligned address", "illegal instruction",
    "invalid program counter", "hardware stack error", "unspecified launch failure",
    "launch timed out", "cuda error: unknown error", "cublas_status_execution_failed", "ecc error",
    "nvlink error", "device lost",
)  # fmt: skip


def is_device_lost(error: Exception) -> bool:
    """Return whether the error's text shows that the device is lost.

    After a device-side assert or an illegal access, every later call on the device fails too.
    Errors without such a sign require a test of the device.
    """
    text = str(error).lower()
    return any(sign in text for sign in SIGNS_OF_LOSS)
