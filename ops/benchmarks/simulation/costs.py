"""Cost model of a step: its floor at the rates that a device sustains, and what a launch costs."""

from dataclasses import dataclass

from ops.benchmarks.measure.step_floor import SHAPES, Ceilings, Shape, Work
from tokenmill_worker.engine.plan import StepPlan

VALUE_BYTES = 2  # of weights, keys and values
# what good kernels reach of the data sheet's peaks
SUSTAINED = Ceilings(bytes_s=0.85 * 4.8e12, operations_s=0.65 * 989e12)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of an H200 with Llama-3-8B."""

    name: str = "H200, Llama-3-8B"
    shape: Shape = SHAPES["llama-3-8b"]
    ceilings: Ceilings = SUSTAINED
    memory: float = 141e9
    overhead_s: float = 0.0008  # launch, sampling and copies of a step

    @property
    def num_cache_tokens(self) -> int:
        """Number of tokens whose keys and values fit beside the weights.

        The engine gets 0.9 of the memory; another 0.1 is reserved for everything else.
        """
        embedding = self.shape.vocab_size * self.shape.hidden_size
        weights = VALUE_BYTES * (self.shape.num_weights + embedding)
        token = VALUE_BYTES * self.shape.kv_numbers * self.shape.num_hidden_layers
        return int((0.8 * self.memory - weights) / token)

    def step_s(self, plan: StepPlan) -> float:
        items = [(item.num_tokens, item.start + item.num_tokens) for item in plan.scheduled]
        return self.seconds(
            sum(count for count, _ in items),
            sum(item.samples for item in plan.scheduled),
            sum(end for _, end in items),
            sum(count * end for count, end in items),
        )

    def seconds(self, tokens: int, sampled: int, read: int, pairs: int) -> float:
        """Return the seconds of a step; the arguments are those of Work."""
        work = Work(tokens, sampled, read, pairs, VALUE_BYTES, VALUE_BYTES)
        return self.overhead_s + self.shape.floor_s(self.ceilings, work)
