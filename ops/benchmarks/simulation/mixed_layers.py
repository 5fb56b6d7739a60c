"""Counts the sequences that a model of sliding and full layers holds at once, by their lengths.

The model is Gemma 3 27B: 52 of its 62 layers see 1,024 tokens, and all groups of layers take blocks
from one pool. Sizes, scheduler and block tables are the real ones; tokens are made up, and time is
not simulated. All requests wait from the start.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from ops.benchmarks.simulation.load import MAX_PROMPT, answer_length, draw_length
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engine.cache_config import CacheConfig, LayerGroup, with_common_blocks
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.kv.sizing import MemoryShape, solve
from tokenmill_worker.engine.plan import StepOutput
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.sequence import Sequence

CACHE_GIB = 40
NUM_REQUESTS = 300
MAX_MODEL_LEN = 131_072
NUM_LAYERS, WINDOW = 62, 1_024
FULL = range(5, NUM_LAYERS, 6)
GROUPS = with_common_blocks(
    [
        LayerGroup(tuple(i for i in range(NUM_LAYERS) if i not in FULL), 16, 128, WINDOW),
        LayerGroup(tuple(FULL), 16, 128),
    ]
)
MAX_NUM_TOKENS, MAX_NUM_SEQS = 2_048, 256  # in a step
_ANY_TOKEN = (5,)

Lengths = tuple[int, int]  # of prompt and answer


def _chats(source: random.Random) -> Lengths:
    return draw_length(source, 1_020, 0.8, MAX_PROMPT), answer_length(source)


def _skewed(source: random.Random) -> Lengths:
    return draw_length(source, 2_000, 1.2, 60_000), draw_length(source, 250, 0.8, 2_000)


def _few_long(source: random.Random) -> Lengths:
    shortest, longest = (16_000, 48_000) if source.random() < 0.1 else (200, 2_000)
    return source.randint(shortest, longest), 300


TRACES: dict[str, Callable[[random.Random], Lengths]] = {
    "chats of about 1,000 tokens": _chats,
    "skewed, 50 to 60,000 tokens": _skewed,
    "9 short beside 1 of 16,000 to 48,000": _few_long,
}


def measure(seed: int, waiting: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Serve each trace, and return figures by trace."""
    found = {}
    for name, draw in TRACES.items():
        waiting(name)
        source = random.Random(f"mixed/{seed}")
        found[name] = serve([draw(source) for _ in range(NUM_REQUESTS)])
    return found


def serve(requests: Seq[Lengths]) -> dict[str, float]:
    """Return how many sequences ran on average while others waited, at most, and preemptions."""
    scheduler = new_scheduler()
    scheduler.add([_sequence(number, *lengths) for number, lengths in enumerate(requests)])
    held: list[int] = []
    while scheduler.has_work:
        plan = scheduler.plan()
        count = sum(item.samples for item in plan.scheduled)
        scheduler.commit(plan, StepOutput(plan.step_id, (_ANY_TOKEN,) * count, (None,) * count, {}))
        scheduler.take_released()
        capacity = scheduler.capacity()
        if capacity.waiting:
            held.append(capacity.running)
    return {
        "held": sum(held) / len(held),
        "held_most": max(held),
        "steps": plan.step_id + 1,
        "preemptions": scheduler.stats.preemptions,
    }


def new_scheduler() -> Scheduler:
    shape = MemoryShape(
        groups=GROUPS, block_size=16, kv_bytes=2, activation_bytes=2, hidden_size=5_376,
        intermediate_size=21_504, query_size=4_096, vocab_size=262_208,
        max_num_tokens=MAX_NUM_TOKENS, max_num_rows=MAX_NUM_SEQS, max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )  # fmt: skip
    num_blocks = solve(shape, shape.fixed + (CACHE_GIB << 30))
    cache = CacheConfig(16, GROUPS, num_blocks, prefix_cache=False)
    config = EngineConfig(
        model="simulated", block_size=16, prefix_cache=False, max_waiting=NUM_REQUESTS,
        max_num_batched_tokens=MAX_NUM_TOKENS, max_num_seqs=MAX_NUM_SEQS,
    )  # fmt: skip
    return Scheduler(config, cache, max_model_len=MAX_MODEL_LEN, eos_token_ids=frozenset())


def _sequence(number: int, num_prompt_tokens: int, num_output_tokens: int) -> Sequence:
    return Sequence(
        request_id=str(number),
        token_ids=[7] * num_prompt_tokens,
        num_prompt_tokens=num_prompt_tokens,
        params=SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True),
    )
