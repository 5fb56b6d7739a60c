from tests.engine.scheduler.loop import Loop, make_cache, make_sequence
import pytest, random


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
@pytest.mark.parametrize("host", [0, 12])
@pytest.mark.parametrize("blocks", [12, 64])
def test_mix(policy, is_async, windows, host, blocks):
    rng = random.Random(1)
    loop = Loop.build(
        make_cache(blocks, windows=windows, num_host_blocks=host),
        is_async=is_async,
        policy=policy,
        max_num_batched_tokens=16,
        max_num_seqs=6,
    )
    shared = [rng.randrange(1, 50) for _ in range(13)]
    for i in range(30):
        p = (shared if i % 2 else []) + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 14))]
        loop.add(
            *[
                make_sequence(f"r{i}", p, rng.randrange(1, 12), choice=c, seed=c, priority=i % 3, arrival=i)
                for c in range(1 + (i % 5 == 0) * 2)
            ]
        )
        if i % 3 == 0:
            loop.step()
    loop.run()
    loop.assert_truth()
    print(loop.scheduler.snapshot())
