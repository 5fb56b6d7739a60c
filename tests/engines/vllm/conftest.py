"""A service with vLLM for each module of tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engines.vllm.service import Service
from tests.support.lifecycle import need_valkey
from tests.support.valkey import ControlledValkey


@pytest.fixture(scope="module")
def make_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """Start a Valkey, and make services on it: `make_service(PLUGIN, …, SETTING=VALUE, …)`."""
    need_valkey()
    services: list[Service] = []
    with ControlledValkey(persistent=False) as valkey:

        def make(*plugins: str, beside: Service | None = None, **settings: object) -> Service:
            folder = tmp_path_factory.mktemp("service")
            services.append(Service(folder, valkey, *plugins, beside=beside, **settings))
            return services[-1]

        yield make
        for service in services:
            service.end()
