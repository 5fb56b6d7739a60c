"""A device is picked by name, and every "auto" of the settings is resolved for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.device import Device
from tokenmill_worker.engines.own.execution.build import pick_device, resolved
from tokenmill_worker.engines.own.model.loader import load_model


def test_a_device_has_the_contract_of_its_kind() -> None:
    assert isinstance(pick_device("cpu"), CpuDevice)
    assert type(pick_device("meta")) is Device
    assert pick_device("auto").uses_host_memory is not torch.cuda.is_available()


def test_an_unknown_or_missing_device_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="'quantum' is not a device"):
        pick_device("quantum")
    if not torch.cuda.is_available():
        with pytest.raises(EngineConfigError, match="sees no CUDA device"):
            pick_device("cuda:0")


def test_a_device_without_its_own_code_runs_torch_s_operators() -> None:
    device, config = Device(torch.device("cpu")), EngineConfig(model="none")
    arrays = [np.arange(3), np.arange(8).reshape(2, 4)]
    uploaded = device.upload(arrays, np.int32)
    assert [tensor.tolist() for tensor in uploaded] == [array.tolist() for array in arrays]
    assert uploaded[0].dtype == torch.int32
    assert device.allocate(5).tolist() == [0] * 5
    assert device.replace_modules(nn.Linear(2, 2), config) is None
    assert device.token_kernel(config) is None
    with pytest.raises(EngineConfigError, match="quantization 'int8' runs on the CPU"):
        device.replace_modules(nn.Linear(2, 2), config.replace(quantization="int8"))


def test_the_limits_of_a_step_default_to_the_device_s(llama: Path) -> None:
    loaded = load_model(llama, EngineConfig(model=str(llama)), CpuDevice())
    gpu = CpuDevice()
    gpu.is_asynchronous = True

    def limits(device: CpuDevice, **given: int) -> tuple[int, int]:
        config = EngineConfig(model="any", **given)  # type: ignore[arg-type]
        config = resolved(config, dataclasses.replace(loaded, device=device))
        return config.max_num_seqs, config.max_num_batched_tokens

    assert limits(CpuDevice()) == (64, 512)
    assert limits(gpu) == (256, 2048)
    assert limits(gpu, max_num_seqs=4096) == (4096, 4096)
    assert limits(gpu, max_num_batched_tokens=100) == (100, 100)
    assert limits(gpu, max_num_seqs=7, max_num_batched_tokens=70) == (7, 70)
