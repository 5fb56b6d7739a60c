"""Holds what the handlers share: the queues, the recorded responses and the keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from tokenmill.sql.results import SqlResults
from tokenmill_gateway.keys import OPEN, ApiKey, KeyRing, wrong_key
from tokenmill_gateway.metrics import GatewayMetrics
from tokenmill_gateway.queues import Queues
from tokenmill_gateway.records import Records
from tokenmill_gateway.refusals import HttpRefusal
from tokenmill_gateway.sse import OpenStreams
from tokenmill_gateway.storage import Storage


@dataclass(slots=True)
class Server:
    """One gateway. `ring` is None where no key is asked for, `storage` where no files are kept."""

    queues: Queues
    records: Records
    usage: SqlResults
    ring: KeyRing | None
    answer_s: float
    storage: Storage | None = None
    is_draining: bool = False
    streams: OpenStreams = field(default_factory=OpenStreams)
    metrics: GatewayMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = GatewayMetrics(self.streams.__len__)

    def drain(self) -> None:
        """End the streams, each behind a whole event. No answer is cancelled, and plain ones are
        still waited for.
        """
        self.is_draining = True
        self.streams.end()

    async def writer_of(self, request: Request) -> ApiKey:
        """Return the key of a request that changes something. Raises HttpRefusal."""
        key = await self.key_of(request)
        if not key.may_write:
            raise HttpRefusal.of(403, "read_only_key", "this API key may only read")
        return key

    async def key_of(self, request: Request) -> ApiKey:
        """Return the key of a request. Raises HttpRefusal without a valid one."""
        if self.ring is None:
            return OPEN
        if "tmk-" in request.url.query:
            words = "an API key belongs into the header Authorization, not in a query"
            raise HttpRefusal.of(401, "invalid_api_key", words)
        given = request.headers.getlist("authorization")
        scheme, _, text = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer":
            raise wrong_key()
        return await self.ring.find(text.strip())

    @property
    def stored(self) -> Storage:
        """Return the files and batches. Raises HttpRefusal where none are kept."""
        if self.storage is None:
            words = "this gateway keeps no files: it was started without --files"
            raise HttpRefusal.of(404, "unknown_url", words)
        return self.storage
