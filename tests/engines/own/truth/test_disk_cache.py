"""The cache on disk, on real forward passes: a restarted engine hits what the last one computed,
and no token changes, whatever happens to the files.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.own.lora.support import save_adapter
from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.truth import tiny_models
from tests.engines.own.truth.test_features import GREEDY, SEEDED, prompt
from tests.support.collecting_engine import CollectedOutput, CollectingEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.contract.messages import Frame, Mailbox, Report, Stop, Submit
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.serve.loop import EngineLoop

LONG = [prompt(seed, length) for seed, length in ((1, 150), (2, 130), (3, 97), (4, 170))]
PARAMS = [GREEDY, SEEDED, SEEDED, GREEDY]

Make = Callable[..., CollectingEngine]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    """One model of full attention, one with sliding windows beside it."""
    return folder_of(request.param)


def engine_of(folder: Path, **changes: Any) -> CollectingEngine:
    settings: dict[str, Any] = {
        "model": str(folder), "dtype": "float32", "device": "cpu", "num_blocks": 256,
        "block_size": 8, "max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 8,
        "num_threads": 1, "verify_model": False,
    }  # fmt: skip
    return CollectingEngine.load(EngineConfig(**(settings | changes)))


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Make]:
    """Return a function that starts an engine above one folder on disk."""
    started: list[CollectingEngine] = []

    def start(**changes: Any) -> CollectingEngine:
        started.append(engine_of(folder, **({"cache_disk": str(tmp_path / "disk")} | changes)))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[tuple[int, ...]]:
    engine = engine_of(folder, prefix_cache=False)
    pairs = zip(LONG, PARAMS, strict=True)
    return [engine.generate_batch([ids], [params])[0].token_ids for ids, params in pairs]


def tokens(outputs: list[CollectedOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def write_out(engine: CollectingEngine) -> None:
    """Let every block that was computed reach the disk."""
    end = time.monotonic() + 30
    tier = engine.scheduler.kv.tier
    assert tier.disk is not None
    while tier.has_unsaved or tier.disk.num_unwritten:
        assert time.monotonic() < end
        engine.step()
        time.sleep(0.001)


def test_a_restarted_engine_hits_the_prompts_of_the_last_one(
    make: Make, undisturbed: list[tuple[int, ...]]
) -> None:
    first = make()
    assert tokens(first.generate_batch(LONG, PARAMS)) == undisturbed
    first.close()
    again = make()
    outputs = again.generate_batch(LONG, PARAMS)
    assert tokens(outputs) == undisturbed
    largest = max(again.scheduler.kv.block_sizes)
    for ids, output in zip(LONG, outputs, strict=True):
        assert output.num_cached_tokens >= len(ids) - 1 - largest
    stats = again.stats()
    assert stats.disk_blocks_read > 0
    assert not sum(stats.disk_failures.values())
    check_integrity(again.scheduler)


def test_a_killed_engine_leaves_its_blocks_and_the_next_turn_hits_them(
    make: Make, undisturbed: list[tuple[int, ...]], folder: Path
) -> None:
    first = make()
    answer = first.generate_batch([LONG[0]], GREEDY)[0].token_ids
    write_out(first)  # in the background; the engine is not closed
    turn = [*LONG[0], *answer, *prompt(9, 20)]
    output = make().generate_batch([turn], GREEDY)[0]
    size = max(first.scheduler.kv.block_sizes)
    assert output.num_cached_tokens >= (len(LONG[0]) + len(answer) - 1) // size * size - size
    plain = engine_of(folder, prefix_cache=False)
    assert output.token_ids == plain.generate_batch([turn], GREEDY)[0].token_ids


def test_a_stopped_loop_leaves_its_running_answer_to_a_successor(
    make: Make, undisturbed: list[tuple[int, ...]]
) -> None:
    """A draining worker stops its engine so; another one gets the job with its tokens so far."""
    mailbox = Mailbox()
    delivered: list[int] = []

    def emit(report: Report) -> None:
        if isinstance(report, Frame):
            delivered.extend(token for event in report.events for token in event.token_ids)
            if len(delivered) >= 17:
                mailbox.put(Stop())

    request = GenerationRequest(request_id="a", prompt=Prompt(tuple(LONG[1])), params=PARAMS[1])
    mailbox.put(Submit(requests=(request,)))
    EngineLoop(make(), mailbox, emit).run()
    assert 17 <= len(delivered) < 24
    second = make()
    second.add_request(LONG[1], PARAMS[1], "a", resumed=(tuple(delivered),))
    assert (*delivered, *second.result("a").token_ids) == undisturbed[1]
    largest = max(second.scheduler.kv.block_sizes)
    assert second.stats().cached_tokens >= len(LONG[1]) + len(delivered) - 2 * largest
    assert second.stats().computed_tokens <= 24 + 2 * largest


def test_engines_that_share_a_folder_hit_each_other_s_blocks(
    make: Make, undisturbed: list[tuple[int, ...]]
) -> None:
    both = [make(), make()]
    assert tokens(both[0].generate_batch(LONG[:2], PARAMS[:2])) == undisturbed[:2]
    assert tokens(both[1].generate_batch(LONG[2:], PARAMS[2:])) == undisturbed[2:]
    for engine in both:
        write_out(engine)
    for engine in both:
        assert tokens(engine.generate_batch(LONG, PARAMS)) == undisturbed
        assert engine.stats().disk_blocks_read > 0
        check_integrity(engine.scheduler)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_and_swapped_files_change_no_token(
    make: Make, undisturbed: list[tuple[int, ...]], tmp_path: Path, seed: int
) -> None:
    first = make()
    first.generate_batch(LONG, PARAMS)
    first.close()
    chance = random.Random(seed)
    paths = sorted((tmp_path / "disk").rglob("*.kv"))
    for path in chance.sample(paths, len(paths) // 3):
        data = bytearray(path.read_bytes())
        match chance.randrange(4):
            case 0:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            case 1:
                del data[chance.randrange(len(data)) :]
            case 2:
                data = bytearray(chance.choice(paths).read_bytes())
            case 3:
                data = bytearray(chance.randbytes(len(data)))
        path.write_bytes(data)
    engine = make()
    assert tokens(engine.generate_batch(LONG, PARAMS)) == undisturbed
    assert engine.stats().disk_failures["damaged"] > 0
    check_integrity(engine.scheduler)


def test_a_folder_that_is_removed_while_it_is_used_changes_no_token(
    make: Make, undisturbed: list[tuple[int, ...]], tmp_path: Path
) -> None:
    engine = make()
    names = engine.add_requests(LONG, PARAMS)
    for _ in range(4):
        engine.step()
    shutil.rmtree(tmp_path / "disk", ignore_errors=True)
    assert [engine.result(name).token_ids for name in names] == undisturbed
    assert tokens(make().generate_batch(LONG, PARAMS)) == undisturbed


def test_preemption_in_tiny_pools_above_the_disk_changes_no_token(
    make: Make, undisturbed: list[tuple[int, ...]]
) -> None:
    for _ in range(3):
        engine = make(num_blocks=60, safety_margin=0.0)
        assert tokens(engine.generate_batch(LONG * 2, PARAMS * 2)) == undisturbed * 2
        write_out(engine)
        check_integrity(engine.scheduler)
        assert engine.stats().blocks_free == engine.stats().blocks_total
    assert engine.stats().disk_blocks_read > 0


def test_tenants_stay_apart_on_disk(make: Make) -> None:
    first = make()
    first.add_request(LONG[0], GREEDY, "a", cache_salt="a")
    first.result("a")
    first.close()
    second = make()
    for name, salt in (("b", "b"), ("none", "")):
        second.add_request(LONG[0], GREEDY, name, cache_salt=salt)
        assert second.result(name).num_cached_tokens == 0
    assert second.stats().disk_blocks_read == 0
    second.add_request(LONG[0], GREEDY, "a", cache_salt="a")
    assert second.result("a").num_cached_tokens > 100


@pytest.mark.parametrize(
    "changes",
    [{"kv_dtype": "bfloat16"}, {"quantization": "int8"}, {"block_size": 16}, {"fuse": False}],
    ids=str,
)
def test_another_type_or_layout_does_not_take_the_blocks_and_takes_its_own(
    make: Make, folder: Path, changes: dict[str, Any]
) -> None:
    first = make()
    first.generate_batch(LONG, PARAMS)
    first.close()
    plain = engine_of(folder, prefix_cache=False, **changes)
    for is_there in (False, True):
        engine = make(**changes)
        outputs = engine.generate_batch(LONG[:1], PARAMS[:1])
        assert bool(engine.stats().disk_blocks_read) is is_there
        assert tokens(outputs) == tokens(plain.generate_batch(LONG[:1], PARAMS[:1]))
        engine.close()


def test_other_weights_in_the_same_folder_do_not_take_the_blocks(tmp_path: Path) -> None:
    folder, disk = tiny_models.save("llama", tmp_path / "model"), str(tmp_path / "disk")
    first = engine_of(folder, cache_disk=disk)
    first.generate_batch(LONG, PARAMS)
    first.close()
    tiny_models.save("llama", folder, seed=1)
    engine, plain = engine_of(folder, cache_disk=disk), engine_of(folder, prefix_cache=False)
    assert tokens(engine.generate_batch(LONG, PARAMS)) == tokens(plain.generate_batch(LONG, PARAMS))
    assert engine.stats().disk_blocks_read == 0
    engine.close()


def test_adapters_stay_apart_on_disk(llama: Path, tmp_path: Path) -> None:
    adapters = {
        name: save_adapter(llama, tmp_path / name, seed)
        for name, seed in zip("ab", (1, 2), strict=True)
    }
    given = ",".join(f"{name}={path}" for name, path in adapters.items())
    settings = {"cache_disk": str(tmp_path / "disk"), "adapters": given}
    found: list[list[tuple[int, ...]]] = []
    for round_ in range(2):
        engine = engine_of(llama, **settings)
        answers = []
        for lora in ("a", "b", ""):
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, lora=lora)
            output = engine.generate_batch([LONG[0]], params)[0]
            assert (output.num_cached_tokens > 100) is bool(round_)
            answers.append(output.token_ids)
        found.append(answers)
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("changes", [
    {"kv_dtype": "float8_e4m3fn"},
    {"kv_dtype": "bfloat16"},
    {"draft_model": "itself", "speculative_tokens": 3},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_blocks_of_other_types_and_with_drafts_come_back_as_they_were(
    llama: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = {**changes, **({"draft_model": str(llama)} if "draft_model" in changes else {})}
    found = []
    for disk in (None, tmp_path / "disk", tmp_path / "disk"):
        engine = engine_of(llama, cache_disk=disk and str(disk), **changes)
        found.append(engine.generate_batch(LONG, PARAMS))
        num_read, failures = engine.stats().disk_blocks_read, engine.stats().disk_failures
        engine.close()
        assert not sum(failures.values())
    plain, written, read = map(tokens, found)
    assert plain == written == read
    assert num_read >= sum(len(ids) // 8 - 1 for ids in LONG)


def test_a_folder_that_cannot_be_used_stops_the_start(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineConfigError, match=r"cache_disk .*file cannot be used"):
        engine_of(llama, cache_disk=str(tmp_path / "file"))
    with pytest.raises(EngineConfigError, match=r"cache_disk_gib \(1e-06\) holds no block"):
        engine_of(llama, cache_disk=str(tmp_path / "disk"), cache_disk_gib=1e-6)
    with pytest.raises(EngineConfigError, match="cache_disk does nothing without prefix_cache"):
        engine_of(llama, cache_disk=str(tmp_path / "disk"), prefix_cache=False)
