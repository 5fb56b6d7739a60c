"""Each exception of the clients survives a way to another process: class, sentence, attributes."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import celery
import pytest

import tokenmill
from tokenmill import errors
from tokenmill.bulk.batch import BatchNotFound
from tokenmill.celery.values import GenerationFailed
from tokenmill.errors import TokenmillError
from tokenmill.files.object_store import FilesUnavailable
from tokenmill.openai.form_values import FormError
from tokenmill.operations.submit import JobHandle
from tokenmill.webhooks import BadSignature
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.result import JobError, JobResult, JobStatus

RESULT = JobResult(
    job_id="j",
    status=JobStatus.FAILED,
    model="m",
    error=JobError("engine_error", "boom"),
    params=SamplingParams(logit_bias={7: 1.5}),
)
HANDLE = JobHandle("j1", is_new=False)
SAMPLES: tuple[TokenmillError, ...] = (
    TokenmillError("a sentence"),
    errors.ConfigurationError("a wrong URL"),
    errors.InvalidRequest(["a is bad", "b; c is bad"]),
    errors.QueueRefusal("refused"),
    errors.QueueFull("q", 5, 4),
    errors.QueueFull("q", 5, 4, [HANDLE, "j2"]),
    errors.RateLimited("t", 1.5, ["j1"]),
    errors.IdempotencyConflict(HANDLE),
    errors.JobNotFound(HANDLE),
    errors.ResultTimeout(HANDLE, 5),
    errors.QueueUnserved("q", HANDLE),
    errors.JobFailed(RESULT),
    errors.ClientClosed(),
    errors.QueueUnavailable("Redis is away"),
    errors.UnreadableRecord("damaged"),
    BatchNotFound("b1"),
    FilesUnavailable("the store is away"),
    GenerationFailed("j1", "failed", "boom"),
    FormError("prompt must be a text", "prompt", "invalid_type"),
    BadSignature("no signature"),
)


def same(back: BaseException, error: TokenmillError) -> bool:
    return (
        type(back) is type(error)
        and str(back) == str(error)
        and back.__dict__ == error.__dict__
        and isinstance(back, TokenmillError)
    )


def raised(place: int) -> None:
    raise SAMPLES[place]


def through_celery(serializer: str) -> Callable[[TokenmillError], BaseException]:
    """Store an exception as a result backend with this serializer does, and read it back."""
    app = celery.Celery(
        "test", backend="cache+memory://", result_serializer=serializer, accept_content=[serializer]
    )
    backend = app.backend

    def carried(error: TokenmillError) -> BaseException:
        stored = backend.encode(backend.prepare_exception(error))
        back: BaseException = backend.exception_to_python(backend.decode(stored))
        return back

    return carried


def every_class() -> Iterator[type[TokenmillError]]:
    """Yield the exception classes of all modules of the client."""
    for module in pkgutil.walk_packages(tokenmill.__path__, "tokenmill."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = [TokenmillError]
    for kind in found:
        found += kind.__subclasses__()
        if kind.__module__.startswith("tokenmill."):
            yield kind


def test_each_exception_class_of_the_client_has_a_sample() -> None:
    assert set(every_class()) == {type(error) for error in SAMPLES}


WAYS: dict[str, Callable[[TokenmillError], BaseException]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "celery json": through_celery("json"),
    "celery pickle": through_celery("pickle"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_a_pickled_exception_keeps_class_sentence_and_attributes(
    error: TokenmillError, way: str
) -> None:
    back = WAYS[way](error)
    assert same(back, error), (back, back.__dict__)


def test_the_repr_of_job_failed_holds_its_sentence_and_no_answer() -> None:
    assert repr(errors.JobFailed(RESULT)) == "JobFailed('job j has no answer: boom')"


def test_a_process_pool_raises_each_exception_unchanged_and_stays_usable() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        calls = [pool.submit(raised, place) for place in range(len(SAMPLES))]
        for call, error in zip(calls, SAMPLES, strict=True):
            back = call.exception(60)
            assert isinstance(back, TokenmillError)
            assert same(back, error)
        assert pool.submit(len, "abc").result(60) == 3
