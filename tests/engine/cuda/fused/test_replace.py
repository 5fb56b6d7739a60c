"""Tests of the warning about modules that could be fused on a device and are not."""

from pathlib import Path

import pytest

from tests.engine.truth import tiny_models
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.cpu.device import CpuDevice
from tokenmill_worker.engine.model.loader import load_model

pytest.importorskip("triton")
from tokenmill_worker.engine.cuda.attention.triton import is_interpreted
from tokenmill_worker.engine.cuda.fused.replace import replace_modules


@pytest.mark.skipif(is_interpreted(), reason="kernels are interpreted in this process")
def test_a_stand_in_that_fails_is_a_warning_once_and_the_model_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels do not run on a CPU's tensors."""
    folder = tiny_models.save("llama", tmp_path, num_layers=2)
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", fuse=False)
    assert not replace_modules(load_model(folder, config, CpuDevice()).model)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == len(set(said))
    assert {line.split(" is not fused")[0] for line in said} == {
        "LlamaRMSNorm",
        "LlamaMLP",
        "LlamaAttention",
    }
