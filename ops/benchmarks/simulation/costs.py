"""Cost model of a step: bytes and operations, divided by the rates that the device sustains.

Each part of a step is a roofline. The linear layers read all weights once and multiply every token
with them; attention reads each sequence's keys and values; every step has a fixed launch overhead.
"""

from dataclasses import dataclass

from tokenmill_worker.engine.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Device:
    """A device; `sustained` shares are those of the data sheet's peaks that good kernels reach."""

    name: str
    bandwidth: float  # bytes per second
    flops: float  # operations per second at the weights' precision
    memory: float  # bytes
    sustained_bandwidth: float = 0.85
    sustained_flops: float = 0.65
    overhead_s: float = 0.0008  # launch, sampling and copies of a step


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    parameters: float
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int = 2

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value


H200 = Device("H200", bandwidth=4.8e12, flops=989e12, memory=141e9)
LLAMA_8B = ModelShape(
    "Llama-3-8B", 8.03e9, num_layers=32, hidden_size=4096, num_kv_heads=8, head_dim=128
)


@dataclass(frozen=True, slots=True)
class CostModel:
    device: Device = H200
    model: ModelShape = LLAMA_8B

    @property
    def num_cache_tokens(self) -> int:
        """Number of tokens whose keys and values fit beside the weights.

        The engine gets 0.9 of the memory; another 0.1 is reserved for everything else.
        """
        free = 0.8 * self.device.memory - self.model.weight_bytes
        return int(free / self.model.kv_bytes_per_token)

    def step_s(self, plan: StepPlan) -> float:
        num_tokens = read = pairs = 0
        for item in plan.scheduled:
            end = item.start + item.num_tokens
            num_tokens += item.num_tokens
            read += end
            pairs += item.num_tokens * end
        return self.seconds(num_tokens, read, pairs)

    def seconds(self, num_tokens: int, read: int, pairs: int) -> float:
        """Return the seconds of a step.

        Args:
            num_tokens: tokens that the linear layers compute.
            read: tokens whose keys and values are read.
            pairs: (query, key) pairs per head.
        """
        device, model = self.device, self.model
        bandwidth = device.bandwidth * device.sustained_bandwidth
        flops = device.flops * device.sustained_flops
        linear = max(model.weight_bytes / bandwidth, 2 * model.parameters * num_tokens / flops)
        attention = max(
            read * model.kv_bytes_per_token / bandwidth,
            4 * pairs * model.hidden_size * model.num_layers / flops,
        )
        return device.overhead_s + linear + attention
