"""Proxies with TLS before a gateway, configured by the lines of the guide."""

from __future__ import annotations

import shutil
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme

from tests.gateway.conftest import SLOW, Gateway, running_gateway
from tests.gateway.test_guide import PAGE
from tests.support.pages import blocks
from tests.support.waiting import until
from tests.support.worker import QUEUE, running_worker
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import free_port

pytestmark = [pytest.mark.redis, pytest.mark.slow]
LINES = {language: text for language, text in blocks(PAGE) if language in ("nginx", "caddyfile")}
UPLOAD_MB, PROXY_MB = 20, 21
NGINX = """
pid nginx.pid; error_log stderr; daemon off; master_process off;
events {{ worker_connections 256; }}
http {{
access_log off;
client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f;
uwsgi_temp_path u; scgi_temp_path s;
{lines}
}}
"""
CADDY = "{{\nadmin off\nauto_https off\n}}\n{lines}"


class Front:
    """A proxy before a gateway, and the authority of its certificate."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self.port = free_port()
        authority = trustme.CA()
        mine = authority.issue_cert("localhost")
        mine.private_key_pem.write_to_path(str(folder / "gateway.key"))
        for part in mine.cert_chain_pems:
            part.write_to_path(str(folder / "gateway.pem"), append=True)
        self.context = ssl.create_default_context()
        authority.configure_trust(self.context)
        self._child: GuardedProcess | None = None

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def start(self, gateway: Gateway) -> None:
        """Run the guide's lines, with our ports, folder and limit."""
        address = gateway.url.removeprefix("http://")
        lines = LINES["nginx" if self.name == "nginx" else "caddyfile"]
        lines = lines.replace("/etc/ssl", str(self._folder)).replace("127.0.0.1:8080", address)
        lines = lines.replace("201m", f"{PROXY_MB}m").replace("201MB", f"{PROXY_MB}MB")
        if self.name == "nginx":
            lines = lines.replace("    server 127.0.0.1:8081;\n", "")
            lines = lines.replace("listen 443 ssl", f"listen 127.0.0.1:{self.port} ssl")
            path = self._folder / "nginx.conf"
            path.write_text(NGINX.format(lines=lines))
            command = ["nginx", "-e", "stderr", "-p", str(self._folder), "-c", str(path)]
        else:
            lines = lines.replace(" 127.0.0.1:8081", "")
            lines = lines.replace("api.example.com", f"https://localhost:{self.port}")
            path = self._folder / "Caddyfile"
            path.write_text(CADDY.format(lines=lines))
            command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(path)]
        program = shutil.which(command[0]) or shutil.which(command[0], path="/usr/sbin")
        if program is None:
            pytest.skip(f"no {command[0]} on this machine: apt install {command[0]}")
        log = (self._folder / "log").open("ab")
        self._child = GuardedProcess(
            [program, *command[1:]], at_death=signal.SIGTERM, cwd=self._folder, output=log
        )
        log.close()

    def stop(self) -> None:
        if self._child is not None:
            self._child.end(signal.SIGTERM)


@pytest.fixture(params=["nginx", "caddy"])
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Front]:
    found = Front(request.param, tmp_path)
    yield found
    found.stop()


async def test_a_proxy_with_the_guide_s_lines_passes_streams_and_uploads(
    front: Front, redis_url: str, database: str, tmp_path: Path
) -> None:
    async with (
        running_worker(redis_url, database, model=SLOW),
        running_gateway(
            redis_url,
            database,
            models={SLOW: QUEUE},
            files=str(tmp_path / "files"),
            upload_bytes=UPLOAD_MB * 1_000_000,
        ) as gateway,
        httpx.AsyncClient(verify=front.context, timeout=60) as http,
    ):
        front.start(gateway)
        await until(lambda: answers(http, f"{front.url}/readyz"))
        through: Any = http  # openai's type is that of its own copy of httpx
        client = openai.AsyncOpenAI(
            base_url=f"{front.url}/v1", api_key="none", max_retries=0, http_client=through
        )
        assert await spread_of_a_stream(client) > 0.2
        await upload(client, UPLOAD_MB * 1_000_000)
        # Caddy 2.6 ends the connection of a body that is refused before it has come.
        for size in (
            ()
            if front.name == "caddy"
            else (UPLOAD_MB * 1_000_000 + 70_000, (PROXY_MB + 3) * 1_000_000)
        ):
            assert await status_of_an_upload(client, size) == 413
        await upload(client, 1_000)  # the next request works


async def answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


async def spread_of_a_stream(client: Any) -> float:
    """Return the seconds between the first and the last delta of 40 tokens, one every 20 ms."""
    stream = await client.responses.create(
        model=SLOW, input="Hi", max_output_tokens=40, stream=True, extra_body={"ignore_eos": True}
    )
    times = [time.monotonic() async for event in stream if event.type.endswith("text.delta")]
    assert len(times) > 10
    return times[-1] - times[0]


async def upload(client: Any, size: int) -> None:
    line = b'{"custom_id": "a"}\n'
    content = (line * (size // len(line) + 1))[:size]
    stored = await client.files.create(file=("in.jsonl", content), purpose="batch")
    assert stored.bytes == size
    await client.files.delete(stored.id)


async def status_of_an_upload(client: Any, size: int) -> int:
    with pytest.raises(openai.APIStatusError) as refused:
        await upload(client, size)
    return refused.value.status_code
