"""One value of every message that travels, with every field set to something other than its
default.

They are what `recording` writes down for later versions, and what the fuzzer starts from.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tokenmill_schemas.chat import FunctionCall, Message, TextPart, Tool, ToolCall, ToolFunction
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import Cancel, ControlMessage, Drain, TenantLoad, WorkerStatus
from tokenmill_schemas.generation import (
    ArgumentForm,
    CallableTool,
    CallGrammar,
    FinishReason,
    ResponseFormat,
    SamplingParams,
    TokenLogprob,
)
from tokenmill_schemas.job import JobRequest, Priority, RetryPolicy
from tokenmill_schemas.result import (
    ChoiceResult,
    GeneratedCall,
    JobError,
    JobResult,
    JobStatus,
    ScoredPrompt,
    ToolCallDelta,
    Usage,
)

PLAIN_LOGPROBS: Final = (  # of a worker that names no token by bytes
    TokenLogprob(-0.25, ((72, -0.25), (73, -1.75))),
    TokenLogprob(-2.5, ((105, -2.5),)),
)
LOGPROBS: Final = (
    TokenLogprob(-0.25, ((72, -0.25), (73, -1.75)), b"H", (b"H", b"\xe2\x98")),
    TokenLogprob(-2.5, ((105, -2.5),), b"i", (b"i",)),
)
USAGE: Final = Usage(
    prompt_tokens=11,
    cached_tokens=8,
    completion_tokens=2,
    queue_ms=3,
    ttft_ms=21,
    total_ms=40,
    preemptions=1,
    reasoning_tokens=1,
)
ERROR: Final = JobError("engine_error", "the step failed", retryable=True)
PARAMS: Final = SamplingParams(
    max_tokens=64, min_tokens=2, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=7,
    stop=("END", "\n\n"),
    stop_token_ids=(2, 3), ignore_eos=True, presence_penalty=0.5, frequency_penalty=-0.5,
    repetition_penalty=1.1,
    logit_bias={5: -1.5, 70: 2.0}, logprobs=True, top_logprobs=2, n=2,
    response_format=ResponseFormat(
        json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}, strict=False
    ),
    speculate=False, lora="poems", thinking_budget=100, logprobs_mode="processed_logprobs",
    prompt_logprobs=5, echo=True, bad_words_ids=((5, 4), (9,)),
    sequence_bias=(((5, 4), 3.5), ((6,), -2.0)), no_repeat_ngram_size=3, suppress_tokens=(11, 12),
    begin_suppress_tokens=(13,), forced_bos_token_id=7, forced_eos_token_id=(2, 3),
)  # fmt: skip
CALL: Final = Message(
    "assistant", (TextPart("One "), TextPart("moment")), reasoning="The tool knows.",
    tool_calls=(ToolCall(FunctionCall("sky", '{"of": "Bern"}'), id="c1"),),
)  # fmt: skip
ANSWER: Final = Message("tool", "blue", name="sky", tool_call_id="c1")
REQUEST: Final = JobRequest(
    job_id="job-1", model="q",
    messages=(
        Message("system", "Be brief."), Message("user", "Why is the sky blue? ☀"), CALL, ANSWER,
    ),
    params=PARAMS, stream=False, priority=Priority.INTERACTIVE, tenant="acme",
    idempotency_key="req-42",
    created_ms=1_700_000_000_000, deadline_ms=4_000_000_000_000, not_before_ms=1_700_000_001_000,
    retry=RetryPolicy(max_attempts=5, backoff_ms=200, max_backoff_ms=9_000),
    metadata={"order": "17"},
    webhook="https://example.org/done",
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    batch_id="batch-9", chat_template_kwargs={"enable_thinking": False},
    documents=({"title": "T", "text": "x"},),
    continue_final_message=True, add_generation_prompt=False,
    tools=(Tool(ToolFunction("sky", "its colour", {"type": "object"}, strict=True)),),
    tool_choice="function:sky", parallel_tool_calls=False, continuations=(" blue", (5, 70)),
    envelope=b"{\"kind\":\"response\"}", previous_id="job-0", session="chat-1",
)  # fmt: skip
PROMPT: Final = ScoredPrompt((1, 72, 105), LOGPROBS, (0, 1, 2))
PLAIN_PROMPT: Final = msgspec.structs.replace(PROMPT, logprobs=PLAIN_LOGPROBS)
DELTA: Final = ToolCallDelta(1, "c1", "sky", '{"of', token=1)
CHUNK: Final = Chunk(
    job_id="job-1", index=3, token_ids=(72, 105), text="Hi", choice=1, logprobs=LOGPROBS,
    finish_reason=FinishReason.STOP, attempt=2, status=JobStatus.FAILED, usage=USAGE, error=ERROR,
    text_ends=(1, 2), n=2, after="3.5e", params=PARAMS, tool_calls=(DELTA,), prompt=PROMPT,
    reasoning="Hm", reasoning_ends=(2, 2),
)  # fmt: skip
RESULT: Final = JobResult(
    job_id="job-1", status=JobStatus.SUCCEEDED, model="q", tenant="acme",
    choices=(
        ChoiceResult(
            index=1, text="Hi", token_ids=(72, 105), text_ends=(1, 2),
            finish_reason=FinishReason.LENGTH,
            logprobs=LOGPROBS, reasoning="Hm", reasoning_ends=(2,),
            tool_calls=(GeneratedCall("c1", "sky", '{"of', is_complete=False),),
            call_deltas=(DELTA,),
        ),
    ),
    usage=USAGE, error=ERROR, attempt=2, worker_id="w1", created_ms=1_700_000_000_000,
    started_ms=1_700_000_000_010,
    finished_ms=1_700_000_000_050, metadata={"order": "17"}, v=2, params=PARAMS,
    prompt=PROMPT,
)  # fmt: skip
STATUS: Final = WorkerStatus(
    worker_id="w1", model="m", version="0.1.0", started_ms=5, running=2, waiting=1, free_blocks=9,
    tokens_per_s=12.5,
    draining=True, max_running=32, total_blocks=64, cached_blocks=3, prefix_hits=0.5,
    queue_ms=(1.0, 2.0),
    first_token_ms=(20.0, 45.5), token_ms=(8.0, 9.5), to_record=1, engine_restarts=1,
    problems=("redis",),
    tenants={"acme": TenantLoad(running=2, tokens_per_s=12.5)},
    max_model_len=8_192, adapters=("poems",), aliases={"chat": "m", "verse": "poems"},
)  # fmt: skip

# name → (value, the type that its reader asks for)
SAMPLES: Final[dict[str, tuple[msgspec.Struct, object]]] = {
    "request": (REQUEST, JobRequest),
    "request-prompt": (
        msgspec.structs.replace(
            REQUEST,
            messages=None,
            prompt="Once",
            params=SamplingParams(response_format=ResponseFormat(regex="a+")),
        ),
        JobRequest,
    ),
    "request-ids": (
        msgspec.structs.replace(
            REQUEST,
            messages=None,
            prompt_ids=(1, 300, 70_000),
            params=SamplingParams(
                logprobs=3, response_format=ResponseFormat(grammar='root ::= "a"')
            ),
        ),
        JobRequest,
    ),
    "request-tags": (
        msgspec.structs.replace(
            REQUEST,
            params=SamplingParams(
                response_format=ResponseFormat(structural_tag={"type": "structural_tag"})
            ),
        ),
        JobRequest,
    ),
    "request-calls": (
        msgspec.structs.replace(
            REQUEST,
            params=SamplingParams(
                response_format=ResponseFormat(
                    calls=CallGrammar(
                        trigger="[",
                        before="<",
                        after=">",
                        end="/",
                        separator=",",
                        closing="]",
                        tools=(CallableTool("sky", {"type": "object"}, strict=True),),
                        marks={"[": 7},
                        is_required=True,
                        arguments=ArgumentForm(
                            before="(",
                            after="=",
                            end=")",
                            separator=";",
                            has_plain_texts=True,
                            words={"true": "True"},
                        ),
                        at_start=True,
                        asides=("a:",),
                        aside_end=".",
                        answer="b:",
                    )
                )
            ),
        ),
        JobRequest,
    ),
    "request-least": (JobRequest(job_id="job-2", prompt="Once"), JobRequest),
    "chunk": (
        msgspec.structs.replace(CHUNK, logprobs=PLAIN_LOGPROBS, prompt=PLAIN_PROMPT),
        Chunk,
    ),
    "chunk-bytes": (CHUNK, Chunk),
    "chunk-token": (Chunk(job_id="job-1", index=0, token_ids=(72,), text="H"), Chunk),
    "result": (
        msgspec.structs.replace(
            RESULT,
            choices=(msgspec.structs.replace(RESULT.choices[0], logprobs=PLAIN_LOGPROBS),),
            prompt=PLAIN_PROMPT,
        ),
        JobResult,
    ),
    "result-bytes": (RESULT, JobResult),
    "cancel": (Cancel("job-1"), ControlMessage),
    "drain": (Drain(), ControlMessage),
    "worker-status": (
        msgspec.structs.replace(STATUS, max_model_len=0, adapters=(), aliases={}),
        WorkerStatus,
    ),
    "worker-status-names": (STATUS, WorkerStatus),
    "worker-status-pace": (
        msgspec.structs.replace(STATUS, pace=250.5, urgent=1),
        WorkerStatus,
    ),
}
