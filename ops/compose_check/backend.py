"""A backend on the host: submits as the producer, streams, and compares with the results."""

import threading
import time
from collections.abc import Callable, Mapping

from ops.compose_check.project import CheckFailed
from tokenmill import Client
from tokenmill.sql import SqlResults
from tokenmill_schemas import JobResult

TOKENS = 500  # of an answer that something happens to in its middle
WAIT_S = 300.0


class HostBackend:
    """Jobs through the published ports of a project with these variables."""

    def __init__(self, variables: Mapping[str, str], queue: str = "smollm2-135m-instruct") -> None:
        redis, postgres = variables["REDIS_PORT"], variables["POSTGRES_PORT"]
        producer, password = variables["REDIS_PRODUCER_PASSWORD"], variables["POSTGRES_PASSWORD"]
        database = f"postgresql+psycopg://tokenmill:{password}@127.0.0.1:{postgres}/tokenmill"
        self.client = Client(
            f"redis://producer:{producer}@127.0.0.1:{redis}/0", queue=queue, database=database
        )
        self.results = SqlResults(database)

    def submit(self, count: int, tokens: int) -> list[str]:
        jobs = [
            {
                "messages": [
                    {"role": "user", "content": f"Tell me a long story, number {number}."}
                ],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
            for number in range(count)
        ]
        return [str(job) for job in self.client.submit_many(jobs)]

    def ask(self, count: int = 3, tokens: int = 24) -> list[JobResult]:
        """Run jobs to their ends, and check each stream against its result."""
        return self.ask_while(lambda: None, count, tokens)[0]

    def ask_while(
        self, action: Callable[[], object], count: int = 3, tokens: int = TOKENS
    ) -> tuple[list[JobResult], str]:
        """Stream answers, act once each has begun, check that each is whole; return results and a
        sentence with the longest pause.
        """
        readers = [_Reader(self.client, job) for job in self.submit(count, tokens)]
        for reader in readers:
            reader.start()
        if not all(reader.has_begun.wait(WAIT_S) for reader in readers):
            raise CheckFailed("an answer did not begin")
        began = max(reader.tokens for reader in readers)
        action()
        for reader in readers:
            reader.join(2 * WAIT_S)
        results = [self.client.result(reader.job, timeout=WAIT_S) for reader in readers]
        problems = [
            reader.problem or _difference(reader, result, tokens)
            for reader, result in zip(readers, results, strict=True)
        ]
        if any(problems):
            raise CheckFailed("; ".join(problem for problem in problems if problem))
        pause = max(reader.pause_s for reader in readers)
        told = f"{count} streams whole and equal to their results, from token {began} of {tokens}"
        return results, f"{told}; longest pause {pause:.1f} s"

    def rows(self, jobs: list[str]) -> int:
        """Return how many of the jobs PostgreSQL has."""
        return sum(self.results.get(job) is not None for job in jobs)


class _Reader(threading.Thread):
    """Reads one stream."""

    def __init__(self, client: Client, job: str) -> None:
        super().__init__(daemon=True)
        self.job, self.text, self.tokens, self.pause_s, self.problem = job, "", 0, 0.0, ""
        self.has_begun = threading.Event()
        self._client = client

    def run(self) -> None:
        try:
            last: float | None = None
            for chunk in self._client.stream(self.job, timeout=WAIT_S):
                now = time.monotonic()
                self.pause_s = max(self.pause_s, now - (last or now))
                last = now
                self.text += chunk.text
                self.tokens += len(chunk.token_ids)
                self.has_begun.set()
        except Exception as error:  # whatever it is, it belongs into the check's line
            self.problem = f"stream of {self.job}: {error!r}"
            self.has_begun.set()


def _difference(reader: _Reader, result: JobResult, tokens: int) -> str:
    if result.status != "succeeded" or result.usage.completion_tokens != tokens:
        return f"{reader.job} is {result.status} with {result.usage.completion_tokens} tokens"
    return "" if reader.text == result.text else f"the stream of {reader.job} is not its result"
