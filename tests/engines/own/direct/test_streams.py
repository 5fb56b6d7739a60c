"""Streams of the manager: one output per token, whatever happens to the request meanwhile."""

import asyncio

import pytest

from tests.engines.own.direct.conftest import GREEDY, LONG, load
from tokenmill_worker.engines.own import ContinuousBatchingManager, RequestStatus


def lengths(outputs):
    return [len(one.generated_tokens) for one in outputs]


def test_streamed_and_plain_requests_may_alternate(manager):
    for n in range(3):
        plain = manager.add_request([65, 66], f"plain-{n}")
        assert lengths(manager.request_id_iter(plain)) == [6]
        streamed = manager.add_request([65, 66], f"streamed-{n}", streaming=True)
        chunks = [next(manager.request_id_iter(streamed)) for _ in range(6)]
        assert lengths(chunks) == [1, 2, 3, 4, 5, 6]
        assert manager.get_result(streamed) is None


def test_later_tokens_do_not_change_earlier_outputs(manager):
    with manager.pause():
        manager.add_request([65, 66], "streamed", streaming=True, record_timestamps=True)
    seen, copies = [], []
    for output in manager.request_id_iter("streamed"):
        seen.append(output)
        copies.append((list(output.generated_tokens), list(output.timestamps), output.status))
    assert [(one.generated_tokens, one.timestamps, one.status) for one in seen] == copies
    assert lengths(seen) == [len(stamps) for _, stamps, _ in copies] == [1, 2, 3, 4, 5, 6]


def test_a_preempted_stream_continues_at_its_next_token():
    with (
        load(num_blocks=24, safety_margin=0, max_model_len=150) as engine,
        ContinuousBatchingManager(engine, GREEDY) as manager,
    ):
        names = [
            manager.add_request([65 + n, 66], max_new_tokens=120, streaming=True) for n in range(6)
        ]
        outputs = {name: list(manager.request_id_iter(name)) for name in names}
        assert engine.stats().preemptions > 0
    for streamed in outputs.values():
        assert lengths(streamed) == list(range(1, 121))
        whole = streamed[-1].generated_tokens
        assert all(one.generated_tokens == whole[: len(one.generated_tokens)] for one in streamed)


def test_a_stream_cancelled_while_polled_by_id_ends(manager):
    manager.add_request([65, 66], "long", max_new_tokens=LONG, streaming=True)
    seen = [manager.get_result("long", timeout=20) for _ in range(3)]
    assert lengths(seen) == [1, 2, 3]
    manager.cancel_request("long")
    while (output := manager.get_result("long", timeout=20)) is not None:
        seen.append(output)
    assert lengths(seen[:-1]) == list(range(1, len(seen)))
    assert seen[-1].status is RequestStatus.CANCELLED
    assert len(seen) < LONG


@pytest.mark.parametrize("streaming", [True, False])
def test_a_handler_in_an_event_loop_takes_all_outputs(manager, streaming):
    async def main():
        seen, ended = [], asyncio.get_running_loop().create_future()

        def handle(output):
            seen.append(output)
            if output.is_finished():
                ended.set_result(None)

        with manager.pause():
            manager.add_request([65, 66], "handled", streaming=streaming)
            manager.register_result_handler("handled", handle)
        await asyncio.wait_for(ended, 20)
        return lengths(seen)

    assert asyncio.run(main()) == ([1, 2, 3, 4, 5, 6] if streaming else [6])
    assert manager.get_result() is None
