"""Suspects of a crash run in halving groups until the job that crashes runs alone."""

from tokenmill_worker.jobs import Delivery
from tokenmill_worker.service.quarantine import Quarantine


def delivery(name, crashes=0, alone=False):
    return Delivery(
        job_id=name, token=1, payload=b"", deliveries=1, crashes=crashes, outcome="run", log=(),
        created_ms=0,
        started_ms=0, attempt=1, alone=alone,
    )  # fmt: skip


def names(deliveries):
    return [d.job_id for d in deliveries]


def test_jobs_without_a_crash_start_at_once():
    quarantine = Quarantine(max_num_seqs=8)
    assert names(quarantine.release_suspects([delivery(n) for n in "abc"])) == ["a", "b", "c"]
    assert len(quarantine) == 0


def test_jobs_without_a_crash_are_never_held_back():
    """The engine takes urgent jobs even when full of bulk work, so they must reach it."""
    quarantine = Quarantine(max_num_seqs=2)
    assert names(quarantine.release_suspects([delivery(n) for n in "abc"])) == ["a", "b", "c"]
    assert names(quarantine.release_suspects([delivery("urgent")])) == ["urgent"]
    assert len(quarantine) == 0


def test_a_crash_halves_the_group_of_suspects():
    quarantine = Quarantine(max_num_seqs=4)
    suspects = [delivery(n, crashes=1) for n in "abcd"]
    assert names(quarantine.release_suspects(suspects)) == ["a", "b"]
    assert quarantine.release_suspects([]) == []
    quarantine.ended("a")
    assert names(quarantine.release_suspects([])) == ["c"]


def test_no_job_starts_beside_a_suspect_that_must_run_alone():
    quarantine = Quarantine(max_num_seqs=4)
    assert names(quarantine.release_suspects([delivery("bad", crashes=2), delivery("new")])) == [
        "bad"
    ]
    quarantine.ended("bad")
    assert names(quarantine.release_suspects([])) == ["new"]


def test_the_crashing_job_is_isolated_in_few_crashes():
    crashes = dict.fromkeys(range(64), 0)
    finished: set[int] = set()
    num_crashes = 0
    while True:
        quarantine = Quarantine(max_num_seqs=64)
        waiting = [delivery(str(j), crashes[j]) for j in crashes if j not in finished]
        running = quarantine.release_suspects(waiting)
        while all(d.job_id != "37" for d in running):
            finished |= {int(d.job_id) for d in running}
            for d in running:
                quarantine.ended(d.job_id)
            running = quarantine.release_suspects([])
        num_crashes += 1
        if len(running) == 1:
            break
        for d in running:
            crashes[int(d.job_id)] += 1
    assert num_crashes == 7  # log2(64) halvings, and the one that proves it
    assert sum(crashes.values()) <= 2 * 64


def test_a_claim_after_held_jobs_starts_with_them_at_the_next_release():
    quarantine = Quarantine(max_num_seqs=4)
    first = [delivery("bad", alone=True), delivery("held")]
    assert names(quarantine.admit(first)) == ["bad"]
    quarantine.ended("bad")
    assert quarantine.admit([delivery("new")]) == []
    assert names(quarantine.release_suspects([])) == ["held", "new"]


def test_a_cleared_quarantine_is_empty_and_starts_new_jobs():
    quarantine = Quarantine(max_num_seqs=1)
    quarantine.release_suspects([delivery("a", crashes=1), delivery("b", crashes=1)])
    quarantine.clear()
    assert len(quarantine) == 0
    assert names(quarantine.release_suspects([delivery("c")])) == ["c"]


def test_a_job_that_crashed_alone_runs_alone_again():
    quarantine = Quarantine(max_num_seqs=8)
    started = quarantine.release_suspects(
        [delivery("a"), delivery("bad", crashes=1, alone=True), delivery("b")]
    )
    assert names(started) == ["a"]
    quarantine.ended("a")
    assert names(quarantine.release_suspects([])) == ["bad"]
