"""Keeps the adapters of one engine: loaded by name, the least recently used evicted.

The files' stamps are read whenever a request names an adapter. So an adapter that was replaced on
disk is a new version from the next request on. Each version has its own key, which separates the
prefix cache too. A thread beside the steps loads adapters; requests wait for it as they wait for a
grammar.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokenmill_worker.engines.own.lora.batch import AdapterBatch, LoadedAdapter
from tokenmill_worker.engines.own.lora.files import (
    AdapterError,
    AdapterFile,
    LowRank,
    read_adapter,
    stamp_of,
)
from tokenmill_worker.engines.own.lora.sites import AdapterRange, Sites
from tokenmill_worker.engines.own.lora.slots import AdapterSlots, SlottedBatch
from tokenmill_worker.engines.own.plan import StepPlan
from tokenmill_worker.engines.own.sampling.transfer import upload
from tokenmill_worker.engines.own.types import ProgressCallback


class AppliedAdapters(NamedTuple):
    """Adapters of a step: whether any row has one, and the slot of each row's.

    `slot_of_row` is int64 `[num_tokens]`, −1 for a row without one. None: no row has an adapter, or
    they are not in slots, so that no graph can run the step.
    """

    is_adapted: bool
    slot_of_row: Tensor | None


class Adapters:
    """Adapters by name, from `folders`.

    One thread runs steps; any thread may call `prepare`. With `num_slots`, steps of up to that many
    adapters may be captured as CUDA graphs.
    """

    def __init__(
        self, model: nn.Module, folders: dict[str, Path], *, max_cached: int, num_slots: int = 0
    ) -> None:
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._sites = Sites(model)
        self._folders = folders
        self._max_cached = max_cached
        # by key, the least recently used first
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._known: dict[str, tuple[tuple[int, ...], str]] = {}  # name → stamp of its files, key
        self._lock = threading.Lock()
        self._loading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self._batch: AdapterBatch | SlottedBatch | None = None
        self._num_slots = num_slots
        self._slots: AdapterSlots | None = None

    def check(self, report: ProgressCallback) -> list[str]:
        """Load adapters while places are free, read the rest; return a sentence per bad adapter."""
        problems = []
        largest: dict[str, LowRank] = {}
        for index, name in enumerate(self._folders):
            report(f"loading adapter {name}", index / len(self._folders))
            try:
                adapter = self._load(name, keep=index < self._max_cached)
            except AdapterError as error:
                problems.append(f"adapters {error}")
                continue
            for site, factors in adapter.sites.items():
                if site not in largest or len(factors.a) > len(largest[site].a):
                    largest[site] = factors
        if self._num_slots:
            self._slots = AdapterSlots(largest, self._num_slots)
        return problems

    # ── loading ──

    def prepare(self, name: str) -> Future[str]:
        """Start loading the adapter's current version; the future gives that version's key.

        The future fails with AdapterError. The name is one of `folders`.
        """
        try:
            current = self._current(name)
        except AdapterError as error:
            failed: Future[str] = Future()
            failed.set_exception(error)
            return failed
        if current is None:
            return self._loading.submit(lambda: self._load(name).key)
        done: Future[str] = Future()
        done.set_result(current.key)
        return done

    def _current(self, name: str) -> LoadedAdapter | None:
        """Return the loaded adapter, or None if its files have changed; raises AdapterError."""
        with _named(name):
            stamp = stamp_of(self._folders[name])
        known = self._known.get(name)
        with self._lock:
            return self._loaded.get(known[1]) if known is not None and known[0] == stamp else None

    def _load(self, name: str, keep: bool = True) -> LoadedAdapter:
        current = self._current(name)
        if current is not None:  # another request had it loaded meanwhile
            return current
        with _named(name):
            stamp = stamp_of(self._folders[name])
            adapter = self._placed(name, read_adapter(self._folders[name]))
        with self._lock:
            self._known[name] = (stamp, adapter.key)
            if keep:
                self._loaded[adapter.key] = adapter
                while len(self._loaded) > self._max_cached:
                    self._loaded.popitem(last=False)
        return adapter

    def _placed(self, name: str, file: AdapterFile) -> LoadedAdapter:
        layers: dict[str, list[tuple[AdapterRange, LowRank]]] = {}
        for path, factors in file.layers.items():
            layer_range = self._sites.range_of(path)
            wanted, found = (
                (layer_range.size, layer_range.in_features),
                (factors.b.shape[0], factors.a.shape[1]),
            )
            if wanted != found:
                raise AdapterError(
                    f"its {path} is for a layer of shape {found}, the model's is {wanted}"
                )
            layers.setdefault(layer_range.site, []).append((layer_range, factors))
        sites = {site: self._joined(members) for site, members in layers.items()}
        return LoadedAdapter(f"{name}@{file.digest}", sites)

    def _joined(self, members: list[tuple[AdapterRange, LowRank]]) -> LowRank:
        """Join the factors of a site's layers into one pair.

        The `a` factors are stacked; each `b` factor has its own corner.
        """
        height = members[0][0].site_size
        rank = sum(factors.a.shape[0] for _, factors in members)
        b, column = torch.zeros(height, rank), 0
        for layer_range, factors in members:
            width = factors.a.shape[0]
            b[layer_range.start : layer_range.start + layer_range.size, column : column + width] = (
                factors.b
            )
            column += width
        return LowRank(
            self._moved(torch.cat([factors.a for _, factors in members])), self._moved(b)
        )

    def _moved(self, factor: Tensor) -> Tensor:
        """Copy a factor to the device without waiting for it.

        The engine's thread may be capturing a graph, during which waiting is forbidden.
        """
        return upload(factor.to(self._dtype).contiguous(), self._device)

    # ── steps ──

    def apply(self, plan: StepPlan) -> AppliedAdapters:
        """Prepare the model for this plan. Raises AdapterError."""
        keys = {item.sequence.adapter for item in plan.scheduled} - {""}
        if not keys:
            if self._sites.are_enabled:
                self._sites.disable_adapters()
            return AppliedAdapters(False, None)
        adapters = {key: self._get(key) for key in keys}
        slots = None if self._slots is None else self._slots.place(adapters)
        slot_of_row = None if slots is None else self._slot_of_row(plan, slots)
        if slots is None:
            self._batch = AdapterBatch.of(plan, adapters, self._device, self._sites.head)
        if not self._sites.are_enabled:
            self._sites.enable_adapters(self._add)
        return AppliedAdapters(True, slot_of_row)

    def _slot_of_row(self, plan: StepPlan, slots: dict[str, int]) -> Tensor:
        of_item = [slots.get(item.sequence.adapter, -1) for item in plan.scheduled]
        counts = [item.num_tokens for item in plan.scheduled]
        return upload(torch.tensor(of_item).repeat_interleave(torch.tensor(counts)), self._device)

    def use_slots(self, slot_of_row: Tensor, sampled: Tensor) -> None:
        """Let the next pass add the adapters by these tensors, which a graph's replays read again.

        `sampled` are the rows that reach the output head.
        """
        assert self._slots is not None
        self._batch = SlottedBatch(self._slots, slot_of_row, sampled, self._sites.head)

    def _add(self, site: str, x: Tensor, y: Tensor) -> None:
        if self._batch is not None:
            self._batch.add(site, x, y)

    def _get(self, key: str) -> LoadedAdapter:
        """Return the adapter; load it again if it was evicted while its request waited.

        Raises AdapterError.
        """
        with self._lock:
            found = self._loaded.get(key)
            if found is not None:
                self._loaded.move_to_end(key)
                return found
        name = key.rpartition("@")[0]
        loaded = self._load(name)
        if loaded.key != key:
            raise AdapterError(f"adapter {name!r} was replaced while this request waited")
        return loaded

    def close(self) -> None:
        self._loading.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix the text of an AdapterError with the adapter's name."""
    try:
        yield
    except AdapterError as error:
        raise AdapterError(f"adapter {name!r} cannot be used: {error}") from None
