"""Times work on a device as one replayed CUDA graph, so that Python's launches do not count."""

import time
from collections.abc import Callable, Sequence

import torch

REPLAYS = 5
LEAST_CALLS = 12  # in one graph


def seconds_a_call(works: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the time of one call, in seconds: the mean over a replay, the best of five replays.

    `works` take turns, so that no cache still holds the input of the next call. On a CPU no graph
    is captured, and each is called once.
    """
    turns = max(1, LEAST_CALLS // len(works))
    if device.type != "cuda":
        started = time.perf_counter()
        for work in works:
            work()
        return (time.perf_counter() - started) / len(works)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills the libraries' workspaces
        for work in works:
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for work in works:
                work()
    return min(_replay(graph) for _ in range(REPLAYS)) / (turns * len(works))


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
