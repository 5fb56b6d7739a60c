"""`GET /v1/organization/usage/completions`: a tenant's own usage, in buckets of a day."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.types import ASGIApp

from tokenmill.sql.results import SqlResults, UsageRow
from tokenmill_gateway.queries import query_of
from tokenmill_gateway.refusals import HttpRefusal, json_response
from tokenmill_gateway.server import Server
from tokenmill_gateway.shapes import UsageBucket, UsagePage, UsageResult
from tokenmill_gateway.threads import in_thread

_DAY: Final = timedelta(days=1)
_LATEST: Final = 253_370_764_800  # the year 9999, which is the last of a date
UnixSeconds = Annotated[int, Meta(ge=0, le=_LATEST)]


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A range of time, its end exclusive; a day that it touches is counted whole."""

    start_time: UnixSeconds
    end_time: UnixSeconds | None = None
    bucket_width: Literal["1d"] = "1d"
    group_by: list[Literal["model"]] = []
    models: list[str] = []
    limit: Annotated[int, Meta(ge=1, le=31)] = 7
    page: str | None = None  # `next_page` of the page before


async def completions(server: Server, request: Request) -> ASGIApp:
    key = await server.key_of(request)
    query = query_of(request, UsageQuery)
    first = _day_of(query.start_time) if query.page is None else _day_in(query.page)
    now = datetime.now(UTC).timestamp()
    end = query.end_time if query.end_time is not None else round(now) + 1
    over = _day_of(max(0, end - 1))  # the last day
    last = min(over, first + timedelta(days=query.limit - 1))
    rows = await in_thread(lambda: _rows(server.usage, key.tenant, first, last))
    days = [first + timedelta(days=n) for n in range((last - first).days + 1)]
    buckets = [_bucket(day, _results(rows, day, query)) for day in days]
    has_more = last < over
    next_page = (last + _DAY).isoformat() if has_more else None
    return json_response(UsagePage(data=buckets, has_more=has_more, next_page=next_page))


def _rows(usage: SqlResults, tenant: str, first: date, last: date) -> Sequence[UsageRow]:
    return usage.usage(
        by=("day", "model"), tenant=tenant, since_day=first.isoformat(), until_day=last.isoformat()
    )


def _results(rows: Sequence[UsageRow], day: date, query: UsageQuery) -> list[UsageResult]:
    wanted = [row for row in rows if row.group[0] == day.isoformat()]
    if query.models:
        wanted = [row for row in wanted if row.group[1] in query.models]
    if query.group_by:
        return [_sum([row], row.group[1]) for row in wanted]
    return [_sum(wanted)] if wanted else []


def _sum(rows: Sequence[UsageRow], model: str | None = None) -> UsageResult:
    return UsageResult(
        input_tokens=sum(row.prompt_tokens for row in rows),
        input_cached_tokens=sum(row.cached_tokens for row in rows),
        output_tokens=sum(row.completion_tokens for row in rows),
        num_model_requests=sum(row.jobs for row in rows),
        model=model,
    )


def _bucket(day: date, results: list[UsageResult]) -> UsageBucket:
    start = round(datetime.combine(day, time(), UTC).timestamp())
    return UsageBucket(start_time=start, end_time=start + 86_400, results=results)


def _day_of(seconds: int) -> date:
    return datetime.fromtimestamp(seconds, UTC).date()


def _day_in(page: str) -> date:
    try:
        day = date.fromisoformat(page)
    except ValueError:
        day = date.max
    if not date(1970, 1, 1) <= day <= _day_of(_LATEST):
        words = f"page is the next_page of the page before, not {page[:64]!r}"
        raise HttpRefusal.of(400, "invalid_value", words, "page")
    return day
