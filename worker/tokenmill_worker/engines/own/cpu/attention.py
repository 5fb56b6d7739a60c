"""Paged attention on the CPU by a C++ kernel that reads blocks in place.

It computes in float32 over keys and values stored as float32, bfloat16, float16, E4M3 or E5M2.
The bits of a row's result depend neither on its batch, nor on its chunk, nor on the number of
threads. The one exception: where the CPU has matrix registers (AMX) and may use them, rows that
come with many others are summed there. Those sums are as exact, but their bits differ.

Inside a block the kernel has its own layout: keys in strips of `[head_dim, 16 tokens]`, values as
`[token, head_dim]`. Only the size of a block follows `block_shape`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
)
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.cpu.kernels.library import load
from tokenmill_worker.engines.own.cpu.kernels.program import Caller
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

log = logging.getLogger(__name__)

KV_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
MAX_HEAD_DIM = 1024  # buffers grow with the heads; larger ones are not tested
_FEW_TOKENS = 16  # below this, one thread writes as fast as several


class AttendArguments(ctypes.Structure):
    """Arguments of the attention kernel; the fields match the struct in attention.cpp."""

    _fields_: ClassVar = [
        *(
            (name, c_void_p)
            for name in ("query", "out", "cache", "query_start", "seq_lens", "block_table", "sinks")
        ),
        *((name, c_void_p) for name in ("key_scales", "value_scales", "workspace")),
        *(
            (name, c_int64)
            for name in ("workspace_bytes", "query_stride", "query_head_stride", "block_stride")
        ),
        *((name, c_int64) for name in ("value_offset", "table_stride")),
        *(
            (name, c_int32)
            for name in ("num_tokens", "num_seqs", "num_heads", "num_kv_heads", "head_dim")
        ),
        *(
            (name, c_int32)
            for name in ("block_size", "window", "is_chunked", "kv_type", "uses_amx")
        ),
        *((name, c_float) for name in ("scale", "softcap")),
        ("plan", c_void_p),  # set by the kernel
    ]

    def set_window(self, window: Window | None) -> None:
        """Set which positions a query sees."""
        self.window = 0 if window is None else window.size
        self.is_chunked = window is not None and window.is_chunked


class WriteArguments(ctypes.Structure):
    """Arguments of the cache write kernel; the fields match the struct in cache_write.cpp."""

    _fields_: ClassVar = [
        *(
            (name, c_void_p)
            for name in ("query", "key", "value", "cos", "sin", "rotated", "cache", "slots")
        ),
        *((name, c_void_p) for name in ("key_scales", "value_scales")),
        *(
            (name, c_int64)
            for name in ("query_stride", "query_head_stride", "key_stride", "key_head_stride")
        ),
        *(
            (name, c_int64)
            for name in ("value_stride", "value_head_stride", "cos_stride", "rotated_stride")
        ),
        *((name, c_int64) for name in ("block_stride", "value_offset")),
        *(
            (name, c_int32)
            for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")
        ),
        *((name, c_int32) for name in ("block_size", "kv_type")),
    ]


@lru_cache
def missing_kernel() -> str | None:
    """Return why the kernel cannot be loaded here, or None if it can.

    The result is cached for the process, since a failing compilation may take long.
    """
    try:
        load("attention")
        load("cache_write")
    except KernelUnavailableError as error:
        log.warning(
            "No CPU attention kernel; attention runs in torch, several times slower: %s",
            error,
        )
        return str(error)
    return None


class CpuAttention(AttentionBackend):
    """Attention by the loaded kernels, with one workspace per thread that grows to the largest step
    seen.

    `members` are the write and attend kernels for use in a program. The program's caller fills in
    their arguments and calls `use_workspace` first.
    """

    name = "cpu"

    def __init__(
        self, cache_dir: Path | None = None, march: str = "native", uses_amx: bool = True
    ) -> None:
        self.uses_amx = uses_amx
        attention, cache_write = (
            load("attention", cache_dir, march),
            load("cache_write", cache_dir, march),
        )
        self._call = Caller(cache_dir, march)
        self.members = (cache_write.tokenmill_write_member, attention.tokenmill_attend_member)
        self._local = threading.local()

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
    ) -> str | None:
        if device.type != "cpu":
            return f"the cpu kernel does not run on {device.type}"
        if dtype not in KV_TYPES:
            return f"the cpu kernel does not store keys and values as {dtype}"
        if shape.head_dim % 8 or not 8 <= shape.head_dim <= MAX_HEAD_DIM:
            return (
                "the cpu kernel takes head sizes that are multiples of 8 up to "
                f"{MAX_HEAD_DIM}, not {shape.head_dim}"
            )
        return missing_kernel()

    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_kv_heads, block_size, head_dim

    def write(self, key: Tensor, value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        arguments = self._write_arguments(key, value, cache, metadata)
        self._write(arguments)

    def rope_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Rotate queries and keys (half-rotation, as in Llama) and write keys and values, in one
        pass.

        `cos` and `sin` are float32 `[num_tokens, rotary_dim]`, rotary_dim ≤ head_dim. Returns the
        rotated queries; the rotated keys are stored only in the cache.
        """
        query, cos, sin = _rows(query), _floats(cos), _floats(sin)
        rotated = torch.empty(query.shape, dtype=torch.float32)
        arguments = self._write_arguments(key, value, cache, metadata)
        arguments.query = query.data_ptr()
        arguments.query_stride, arguments.query_head_stride = query.stride(0), query.stride(1)
        arguments.cos, arguments.sin, arguments.cos_stride = (
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
        )
        arguments.rotated, arguments.rotated_stride = rotated.data_ptr(), rotated.stride(0)
        arguments.num_heads, arguments.rotary_dim = query.shape[1], cos.shape[-1]
        self._write(arguments)
        return rotated

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        rows = _rows(query)
        out = torch.empty(rows.shape, dtype=torch.float32)
        extra = None if sinks is None else _floats(sinks)
        arguments = AttendArguments(
            query=rows.data_ptr(),
            out=out.data_ptr(),
            cache=cache.data_ptr(),
            query_start=metadata.query_start.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_table=metadata.block_table.data_ptr(),
            sinks=None if extra is None else extra.data_ptr(),
            query_stride=rows.stride(0),
            query_head_stride=rows.stride(1),
            block_stride=cache.stride(0),
            value_offset=cache.stride(1),
            table_stride=metadata.block_table.stride(0),
            num_tokens=rows.shape[0],
            num_seqs=metadata.num_seqs,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=metadata.block_size,
            kv_type=KV_TYPES[cache.dtype],
            uses_amx=self.uses_amx,
            scale=shape.scale,
            softcap=shape.softcap or 0.0,
        )
        arguments.set_window(metadata.window)
        self.use_workspace(arguments, 0)
        missing = self._attend(arguments)
        if missing:
            self.use_workspace(arguments, missing)
            self._attend(arguments)
        return out if query.dtype == torch.float32 else out.to(query.dtype)

    def _attend(self, arguments: AttendArguments) -> int:
        return self._call(self.members[1], arguments, torch.get_num_threads())

    def _write(self, arguments: WriteArguments) -> None:
        self._call(
            self.members[0],
            arguments,
            torch.get_num_threads() if arguments.num_tokens >= _FEW_TOKENS else 1,
        )

    def use_workspace(self, arguments: AttendArguments, num_bytes: int) -> None:
        """Point a call of attend at a workspace of at least `num_bytes`.

        A call whose workspace is too small returns the number of bytes that it needs.
        """
        arguments.workspace, arguments.workspace_bytes = self.workspace(num_bytes)

    def workspace(self, num_bytes: int) -> tuple[int, int]:
        """Return address and size of this thread's workspace, which has at least `num_bytes`."""
        workspace: Tensor | None = getattr(self._local, "workspace", None)
        if workspace is None or workspace.numel() < num_bytes:
            workspace = torch.empty(max(num_bytes * 5 // 4, 1 << 20) + 64, dtype=torch.uint8)
            workspace[:128] = 0  # the kernel's first words, at whichever cache line: no plan yet
            self._local.workspace = workspace
        start = -workspace.data_ptr() % 64
        return workspace.data_ptr() + start, workspace.numel() - start

    def _write_arguments(
        self, key: Tensor, value: Tensor, cache: Tensor, metadata: AttentionMetadata
    ) -> WriteArguments:
        key, value = _rows(key), _rows(value)
        arguments = WriteArguments(
            key=key.data_ptr(),
            value=value.data_ptr(),
            cache=cache.data_ptr(),
            slots=metadata.slot_mapping.data_ptr(),
            key_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_stride=value.stride(0),
            value_head_stride=value.stride(1),
            block_stride=cache.stride(0),
            value_offset=cache.stride(1),
            num_tokens=key.shape[0],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[2],
            block_size=metadata.block_size,
            kv_type=KV_TYPES[cache.dtype],
        )
        arguments.owners = (key, value)  # conversions live as long as the pointers to them
        return arguments


def _rows(x: Tensor) -> Tensor:
    """Convert to float32 `[num_tokens, heads, head_dim]` with contiguous head dimensions.

    Tokens and heads keep their strides, which may be those of a projection's output.
    """
    x = x.float()
    return x if x.stride(2) == 1 else x.contiguous()


def _floats(x: Tensor) -> Tensor:
    return x.float().contiguous()
