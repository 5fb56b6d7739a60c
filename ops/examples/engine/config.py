"""The settings and abilities of the example, which a worker reads without loading the engine."""

from dataclasses import dataclass

from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.contract.engine_kind import EngineKind


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    kind = __package__  # its name, as `--engine` has it
    model: str = ""
    max_model_len: int | None = None
    max_num_seqs: int = 4


KIND = EngineKind(
    config=ExampleConfig,
    settings=("model", "max_model_len", "max_num_seqs"),  # settings that a worker has
    capabilities=Capabilities(),
)
