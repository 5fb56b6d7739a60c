"""A job that asks for what its worker's engine lacks ends with one sentence."""

import dataclasses

import pytest

from tests.publish.support import MODEL, Clock, delivery_of
from tests.support.tokenizers import byte_level
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobError
from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.text.tokenizer import Tokenizer


def test_what_the_engine_lacks_is_refused_before_the_prompt_is_encoded(monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("the prompt was encoded"))
    engine = Capabilities(limits={"temperature": (0.0, 2.0)})
    model = dataclasses.replace(MODEL, capabilities=engine)
    processor = InputProcessor(byte_level(), model, clock=Clock())
    params = SamplingParams(response_format=ResponseFormat(regex="a+"), temperature=3.0)
    job = JobRequest(job_id="job", prompt="hi", params=params)
    ended = processor.process(delivery_of(job))
    assert isinstance(ended, FinishedJob)
    assert ended.result.error == JobError(
        "invalid_request",
        "response_format.regex is not available on the engine of this queue; "
        "temperature must be between 0 and 2 with the engine of this queue, not 3",
    )
