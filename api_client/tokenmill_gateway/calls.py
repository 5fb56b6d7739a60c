"""The calls of the API: what the gateway routes, and what `/openapi.json` describes."""

from __future__ import annotations

from typing import Final

from tokenmill_gateway import batches, chat, completions, files, models, responses, usage
from tokenmill_gateway.openapi import Call
from tokenmill_gateway.parameters import body_of
from tokenmill_gateway.shapes import (
    BatchInput,
    BatchList,
    DeletedFile,
    DeletedResponse,
    FileInput,
    FileList,
    FileObject,
    HealthReport,
    ItemList,
    ModelList,
    ModelObject,
    UsagePage,
)
from tokenmill_schemas.openai import (
    CHAT_URL,
    COMPLETIONS_URL,
    RESPONSES_URL,
    ChatCompletion,
    Completion,
    ResponseObject,
)
from tokenmill_schemas.openai_batch import BatchObject

_FILE: Final = "/v1/files/{file_id}"
_BATCH: Final = "/v1/batches/{batch_id}"
_EVENTS: Final = ("text/event-stream",)
_RESPONSE: Final = f"{RESPONSES_URL}/{{response_id}}"

CALLS: Final = (
    Call(
        method="POST",
        path=CHAT_URL,
        handler=chat.chat_completion,
        words="Answers a chat",
        body=body_of(CHAT_URL),
        answer=ChatCompletion,
        other=_EVENTS,
    ),
    Call(
        method="POST",
        path=COMPLETIONS_URL,
        handler=completions.create,
        words="Continues a text",
        body=body_of(COMPLETIONS_URL),
        answer=Completion,
        other=_EVENTS,
    ),
    Call(
        method="POST",
        path=RESPONSES_URL,
        handler=responses.create,
        words="Makes a response",
        body=body_of(RESPONSES_URL),
        answer=ResponseObject,
        other=_EVENTS,
    ),
    Call(
        method="GET",
        path=_RESPONSE,
        handler=responses.retrieve,
        words="Returns a response, or its events",
        query=responses.RetrieveQuery,
        answer=ResponseObject,
        other=_EVENTS,
    ),
    Call(
        method="DELETE",
        path=_RESPONSE,
        handler=responses.delete,
        words="Deletes a response",
        answer=DeletedResponse,
    ),
    Call(
        method="POST",
        path=f"{_RESPONSE}/cancel",
        handler=responses.cancel,
        words="Cancels a background response",
        answer=ResponseObject,
    ),
    Call(
        method="GET",
        path=f"{_RESPONSE}/input_items",
        handler=responses.input_items,
        words="Lists the input items of a response",
        query=responses.ItemsQuery,
        answer=ItemList,
    ),
    Call(
        method="POST",
        path="/v1/files",
        handler=files.upload,
        words="Uploads a file, as multipart/form-data",
        body=FileInput,
        is_form=True,
        answer=FileObject,
    ),
    Call(
        method="GET",
        path="/v1/files",
        handler=files.listed,
        words="Lists files",
        query=files.FilesQuery,
        answer=FileList,
    ),
    Call(
        method="GET",
        path=_FILE,
        handler=files.retrieve,
        words="Returns a file's description",
        answer=FileObject,
    ),
    Call(
        method="DELETE",
        path=_FILE,
        handler=files.delete,
        words="Deletes a file",
        answer=DeletedFile,
    ),
    Call(
        method="GET",
        path=f"{_FILE}/content",
        handler=files.content,
        words="Returns a file's bytes, or a range of them",
        other=("application/octet-stream",),
    ),
    Call(
        method="POST",
        path="/v1/batches",
        handler=batches.create,
        words="Begins a batch",
        body=BatchInput,
        answer=BatchObject,
    ),
    Call(
        method="GET",
        path="/v1/batches",
        handler=batches.listed,
        words="Lists batches",
        query=batches.BatchesQuery,
        answer=BatchList,
    ),
    Call(
        method="GET",
        path=_BATCH,
        handler=batches.retrieve,
        words="Returns a batch",
        answer=BatchObject,
    ),
    Call(
        method="POST",
        path=f"{_BATCH}/cancel",
        handler=batches.cancel,
        words="Cancels a batch",
        answer=BatchObject,
    ),
    Call(
        method="GET",
        path="/v1/models",
        handler=models.listed,
        words="Lists the models that the key may use",
        answer=ModelList,
    ),
    Call(
        method="GET",
        path="/v1/models/{model:path}",
        handler=models.one,
        words="Returns a model",
        answer=ModelObject,
    ),
    Call(
        method="GET",
        path="/v1/organization/usage/completions",
        handler=usage.completions,
        words="Returns the tenant's usage in buckets of a day",
        query=usage.UsageQuery,
        answer=UsagePage,
    ),
    Call(
        method="GET",
        path="/healthz",
        handler=models.alive,
        words="Says that the gateway lives",
        answer=HealthReport,
        is_public=True,
    ),
    Call(
        method="GET",
        path="/readyz",
        handler=models.ready,
        words="Says whether the gateway can serve",
        answer=HealthReport,
        is_public=True,
    ),
)
