"""The bodies of files and batches, and the answers of the gateway that are not an answer of a
model: lists, models, usage.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import Meta

from tokenmill_schemas.openai_batch import BatchObject

Item = TypeVar("Item")
SHORTEST_S: Final = 3_600  # after which a file may expire
LONGEST_S: Final = 2_592_000


class ListPage(
    msgspec.Struct, Generic[Item], frozen=True, kw_only=True, tag_field="object", tag="list"
):
    """A page of a list, with the ids of its ends."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(
        cls, found: list[Item], limit: int, id_of: Callable[[Item], str] = attrgetter("id")
    ) -> Self:
        """Return the page of at most `limit`, of which one more tells that more follow."""
        data = found[:limit]
        return cls(
            data=data,
            first_id=id_of(data[0]) if data else None,
            last_id=id_of(data[-1]) if data else None,
            has_more=len(found) > limit,
        )


class HealthReport(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class ModelObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="model"):
    id: str
    created: int = 0
    owned_by: str = "tokenmill"
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET  # as vLLM names it


class ModelList(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    data: list[ModelObject]


class DeletedResponse(msgspec.Struct, frozen=True, tag_field="object", tag="response"):
    id: str
    deleted: bool = True


class FileObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="file"):
    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(ListPage[FileObject], frozen=True, kw_only=True, tag="list"):
    """A page of files."""


class DeletedFile(msgspec.Struct, frozen=True, tag_field="object", tag="file"):
    id: str
    deleted: bool = True


class Expiry(msgspec.Struct, frozen=True, kw_only=True):
    """The time at which a file expires: seconds after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=SHORTEST_S, le=LONGEST_S)]


class BatchInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body that begins a batch. `completion_window`: a number with s, m, h or d."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]*[smhd]$")]
    metadata: dict[str, str] | None = None
    output_expires_after: Expiry | None = None


class FileInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form that uploads a file."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
    anchor: Literal["created_at"] | msgspec.UnsetType = msgspec.field(
        default=msgspec.UNSET, name="expires_after[anchor]"
    )
    seconds: Annotated[int, Meta(ge=SHORTEST_S, le=LONGEST_S)] | msgspec.UnsetType = msgspec.field(
        default=msgspec.UNSET, name="expires_after[seconds]"
    )


class BatchList(ListPage[BatchObject], frozen=True, kw_only=True, tag="list"):
    """A page of batches."""


class ItemList(ListPage[dict[str, Any]], frozen=True, kw_only=True, tag="list"):
    """A page of input items."""


class UsageResult(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="object",
    tag="organization.usage.completions.result",
):
    """The usage of a day; of one model, where it is grouped by model."""

    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    num_model_requests: int
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    model: str | None = None
    project_id: None = None
    user_id: None = None
    api_key_id: None = None
    batch: None = None
    service_tier: None = None


class UsageBucket(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="bucket"):
    start_time: int
    end_time: int
    results: list[UsageResult]


class UsagePage(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="page"):
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None
