"""A whole worker whose engine frames leave a stamp: when which job had how many tokens, in a file.

The stamp is taken where the I/O process receives the frame, so that what a subscriber measures later minus
the stamp is the time that publishing added: detokenising, the script, the server, the client. A job has 0
tokens when the engine is handed it. While the engine is idle, lines of job "-" tell the I/O process's CPU time.
Settings come from the environment, as for any worker; the file's name is the argument.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TextIO

from worker.app import Worker
from worker.engine.host import EngineProcess
from worker.engine.mailbox import Frame
from worker.engine.types import GenerationRequest
from worker.settings import load_settings
from worker.telemetry import configure_logging


class StampingHost(EngineProcess):
    """One line per job and frame: monotonic seconds, job, tokens so far. Flushed when the engine falls idle."""

    stamps: TextIO

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests, now = tuple(requests), time.monotonic()
        super().submit(requests)
        self.stamps.writelines(f"{now} {request.request_id} 0\n" for request in requests)

    async def frames(self) -> AsyncIterator[Frame]:
        so_far: dict[str, int] = {}
        async for frame in super().frames():
            now = time.monotonic()
            for event in frame.events:
                if event.token_ids:
                    so_far[event.request_id] = so_far.get(event.request_id, 0) + len(event.token_ids)
                    self.stamps.write(f"{now} {event.request_id} {so_far[event.request_id]}\n")
            if not frame.stats.num_running:
                self.stamps.write(f"{now} - {time.process_time()}\n")
                self.stamps.flush()
                so_far.clear()
            yield frame


def main() -> int:
    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format)
    with Path(sys.argv[1]).open("a", encoding="ascii", buffering=1 << 20) as stamps:

        def make_host() -> StampingHost:
            host = StampingHost(settings.engine_config(), cache_dir=settings.cache_dir)
            host.stamps = stamps
            return host

        return asyncio.run(Worker(settings, make_host).serve())


if __name__ == "__main__":
    sys.exit(main())
