"""Cost model of a step: its floor at the rates that a device sustains, and what a launch costs.

The device is an H200 with Llama-3-8B.
"""

from ops.benchmarks.measure.step_floor import SHAPES, Ceilings, Work

NAME, SHAPE = "H200, Llama-3-8B", SHAPES["llama-3-8b"]
# what good kernels reach of the data sheet's peaks
SUSTAINED = Ceilings(bytes_s=0.85 * 4.8e12, operations_s=0.65 * 989e12)
OVERHEAD_S = 0.0008  # launch, sampling and copies of a step
VALUE_BYTES = 2  # of weights, keys and values


def seconds(tokens: int, sampled: int, read: int, pairs: int) -> float:
    """Return the seconds of a step; the arguments are those of Work."""
    work = Work(tokens, sampled, read, pairs, VALUE_BYTES, VALUE_BYTES)
    return OVERHEAD_S + SHAPE.floor_s(SUSTAINED, work)
