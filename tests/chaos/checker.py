"""Verifies the promises from outside: what was accepted, what subscribers were told, what stands in SQL.

Shares no code with the worker: rows are read with plain SQL, and a job's expected answer comes from an
undisturbed run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sqlalchemy


@dataclass(slots=True)
class Told:
    """What one subscriber was told of one job."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    problems: list[str] = field(default_factory=list)
    ended: bool = False

    def hear(self, chunk: Any) -> None:
        if self.ended:
            self.problems.append("a chunk after the last one")
        if chunk.index != len(self.token_ids):
            self.problems.append(f"a chunk at {chunk.index} after {len(self.token_ids)} tokens")
        self.token_ids += chunk.token_ids
        self.text += chunk.text
        self.ended = chunk.status is not None


def violations(database: str, expected: dict[str, Any], told: dict[str, list[Told]]) -> list[str]:
    """`expected` maps job ids to results of an undisturbed run; `told` to what each subscriber heard."""
    found: list[str] = []
    engine = sqlalchemy.create_engine(database)
    with engine.connect() as connection:
        jobs = connection.execute(sqlalchemy.text("select id, state, text from jobs")).fetchall()
        usage = connection.execute(
            sqlalchemy.text("select job_id, prompt_tokens, completion_tokens from usage")
        ).fetchall()
    engine.dispose()
    for name, rows in (("result", [row[0] for row in jobs]), ("usage", [row[0] for row in usage])):
        found += [f"job {job} has no {name} row" for job in expected if job not in rows]
        found += [f"job {job} has {rows.count(job)} {name} rows" for job in set(rows) if rows.count(job) > 1]
    for job, state, text in jobs:
        want = expected[job]
        if state != "succeeded":
            found.append(f"job {job} is {state}")
        elif text != want.text:
            found.append(f"job {job}: the stored text differs from the undisturbed run's")
    for job, prompt_tokens, completion_tokens in usage:
        want = expected[job].usage
        if (prompt_tokens, completion_tokens) != (want.prompt_tokens, want.completion_tokens):
            found.append(f"job {job}: billed {prompt_tokens}+{completion_tokens} tokens, not {want}")
    return found + _misled(expected, told)


def _misled(expected: dict[str, Any], told: dict[str, list[Told]]) -> list[str]:
    found: list[str] = []
    for job, subscribers in told.items():
        for number, heard in enumerate(subscribers):
            who = f"subscriber {number} of job {job}"
            found += [f"{who}: {problem}" for problem in heard.problems]
            if not heard.ended:
                found.append(f"{who} heard no end")
            elif (tuple(heard.token_ids), heard.text) != (expected[job].token_ids, expected[job].text):
                found.append(f"{who} was told another answer")
    return found
