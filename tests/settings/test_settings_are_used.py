"""Every setting is read somewhere, and those that the queue's options are made of reach them."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill_worker.builders import stream_options
from tokenmill_worker.queue.job_stream import StreamOptions
from tokenmill_worker.settings import ENGINE_FIELDS, Settings, load_settings

ROOT = Path(__file__).parents[2]


@functools.cache
def read_names() -> set[str]:
    """Return attributes read from names like settings or config, or from `self` in both classes."""
    found: set[str] = set()
    for path in sorted((ROOT / "worker").rglob("*.py")):
        own = path.name in ("fields.py", "engine_config.py", "config.py")
        found |= set(_attributes(ast.parse(path.read_text("utf-8")), with_self=own))
    return found


def _attributes(tree: ast.Module, *, with_self: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        base = node.value
        name = (
            base.id
            if isinstance(base, ast.Name)
            else base.attr
            if isinstance(base, ast.Attribute)
            else ""
        )
        if name.endswith(("settings", "config")) or (with_self and name == "self"):
            yield node.attr


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_every_setting_is_read(name: str) -> None:
    assert name in read_names(), f"nothing in worker/ reads the setting {name}"


def test_a_name_that_is_never_read_is_detected() -> None:
    assert "max_wishes" not in read_names()
    assert set(
        _attributes(ast.parse("self.a; settings.b; self._settings.c; x.d"), with_self=False)
    ) == {"b", "c"}


CHANGED = {
    "lease_seconds": (7.0, "lease_s", 7.0),
    "result_ttl_seconds": (77.0, "result_ttl_s", 77),
    "max_crashes": (5, "max_solo_crashes", 5),
    "bulk_share": (0.25, "bulk_every", 4),
    "queue_limit": (9, "queue_limit", 9),
    "max_payload_bytes": (4096, "max_payload_bytes", 4096),
    "idempotency_ttl_seconds": (99.0, "idempotency_ttl_s", 99.0),
    "tenant_max_running": (3, "tenant_concurrency", 3),
    "tenant_jobs_per_minute": (120.0, "tenant_rate", 2.0),
}


@pytest.mark.parametrize("name", CHANGED)
def test_settings_of_the_queue_are_passed_to_it(name: str) -> None:
    value, option, expected = CHANGED[name]
    assert getattr(stream_options(load_settings({name: value}, strict=False)), option) == expected


def test_every_option_of_the_queue_is_used() -> None:
    """Options that no setting reaches are constants of the design; this test names them."""
    times = {"sweep_s", "dead_ttl_s", "log_ttl_s"}
    constants = times | {"max_deliveries", "max_crashes", "max_claim_bytes"}
    derived = {"tenant_burst"}
    reached = {option for _, option, _ in CHANGED.values()}
    assert {
        field.name for field in dataclasses.fields(StreamOptions)
    } == constants | derived | reached
    assert set(ENGINE_FIELDS) <= set(Settings.model_fields)
