"""Cost model of a step: its floor at the rates that a device sustains, and what a launch costs.

The device is an H200 with Llama-3-8B.
"""

from ops.benchmarks.measure.step_floor import SHAPES, Ceilings, Work
from tokenmill_worker.engine.plan import StepPlan

NAME, SHAPE = "H200, Llama-3-8B", SHAPES["llama-3-8b"]
# what good kernels reach of the data sheet's peaks
SUSTAINED = Ceilings(bytes_s=0.85 * 4.8e12, operations_s=0.65 * 989e12)
MEMORY = 141e9
OVERHEAD_S = 0.0008  # launch, sampling and copies of a step
VALUE_BYTES = 2  # of weights, keys and values


def num_cache_tokens() -> int:
    """Return the number of tokens whose keys and values fit beside the weights.

    The engine gets 0.9 of the memory; another 0.1 is reserved for everything else.
    """
    weights = VALUE_BYTES * (SHAPE.num_weights + SHAPE.vocab_size * SHAPE.hidden_size)
    token = VALUE_BYTES * SHAPE.kv_numbers * SHAPE.num_hidden_layers
    return int((0.8 * MEMORY - weights) / token)


def step_s(plan: StepPlan) -> float:
    items = [(item.num_tokens, item.start + item.num_tokens) for item in plan.scheduled]
    return seconds(
        sum(count for count, _ in items),
        sum(item.samples for item in plan.scheduled),
        sum(end for _, end in items),
        sum(count * end for count, end in items),
    )


def seconds(tokens: int, sampled: int, read: int, pairs: int) -> float:
    """Return the seconds of a step; the arguments are those of Work."""
    work = Work(tokens, sampled, read, pairs, VALUE_BYTES, VALUE_BYTES)
    return OVERHEAD_S + SHAPE.floor_s(SUSTAINED, work)
