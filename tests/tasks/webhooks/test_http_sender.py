"""Tests of the addresses to which webhooks may go, and of receivers that misbehave."""

import ipaddress
import socket
import ssl
import subprocess
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.tasks.receiver import Dripping, Receiver
from tokenmill_worker.tasks.webhooks.addresses import (
    AddressRefused,
    AddressUnknown,
    is_permitted,
    resolve,
)
from tokenmill_worker.tasks.webhooks.http_sender import Sender, SendFailed, _Deadline

LOCAL = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:db8::1",
        "fec0::1", "192.88.99.1", "192.0.0.8", "192.0.0.1", "192.0.0.171", "::ffff:192.0.0.8",
        "64:ff9b:1::808:808",
        "198.18.0.1", "3fff::1", "5f00::1", "100::1", "100:0:0:1::1",
    ],
)  # fmt: skip
def test_private_addresses_are_refused(address: str) -> None:
    assert not is_permitted(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "8.8.8.8", "192.0.0.9", "192.0.0.10", "2606:4700::1111", "64:ff9b::808:808"],
)
def test_public_addresses_are_permitted(address: str) -> None:
    assert is_permitted(ipaddress.ip_address(address))


def test_a_network_is_permitted_by_name() -> None:
    allowed = (ipaddress.ip_network("10.1.0.0/16"),)
    assert is_permitted(ipaddress.ip_address("10.1.2.3"), allowed)
    assert not is_permitted(ipaddress.ip_address("10.2.2.3"), allowed)
    assert not is_permitted(ipaddress.ip_address("::ffff:10.2.0.1"), allowed)


@pytest.mark.parametrize(
    "host", ["localhost", "127.1", "2130706433", "0x7f.1", "0", "[::1]", "127.0.0.1"]
)
def test_every_spelling_of_this_machine_is_refused(host: str) -> None:
    with Receiver() as receiver:
        with pytest.raises((AddressRefused, AddressUnknown)):
            Sender(5).post(f"http://{host}:{receiver.port}/", b"{}", {})
        assert receiver.received == []


def test_a_host_name_without_an_address_is_an_error() -> None:
    with pytest.raises(AddressUnknown, match="has no address"):
        resolve("nobody.invalid", 80)


def test_path_headers_and_body_arrive_as_sent() -> None:
    with Receiver() as receiver:
        url = f"http://us%20er:pa%3Ass@localhost:{receiver.port}/grüße?x=ä b".replace(" ", "%20")
        assert Sender(30, LOCAL).post(url, b'{"a":1}', {"webhook-id": "m"}).is_success
    (seen,) = receiver.received
    assert seen.path == "/gr%C3%BC%C3%9Fe?x=%C3%A4%20b"
    assert seen.body == b'{"a":1}'
    assert seen.headers["host"] == f"localhost:{receiver.port}"
    assert seen.headers["webhook-id"] == "m"
    assert seen.headers["authorization"] == "Basic dXMgZXI6cGE6c3M="


def test_a_redirect_is_not_followed() -> None:
    with Receiver() as elsewhere, Receiver([(302, {"Location": elsewhere.url})]) as receiver:
        reply = Sender(30, LOCAL).post(receiver.url, b"{}", {})
        assert (reply.status, reply.is_success, elsewhere.received) == (302, False, [])


def test_retry_after_is_read_in_seconds_and_as_a_date() -> None:
    soon = formatdate(time.time() + 120, usegmt=True)
    values = [
        "120",
        "Fri, 31 Dec 1999 23:59:59 GMT",
        soon,
        "soon",
        "Fri, 99 Dec 1999 23:59:59 GMT",
        "1" * 20,
    ]
    with Receiver([(503, {"Retry-After": value}) for value in values]) as receiver:
        sender = Sender(30, LOCAL)
        seconds, past, date, *others = (
            sender.post(receiver.url, b"{}", {}).retry_after_s for _ in values
        )
    assert (seconds, past, others) == (120.0, 0.0, [None, None, None])
    assert 60 < (date or 0) <= 121


def test_an_endless_response_is_cut_off() -> None:
    with Dripping() as server, pytest.raises(SendFailed, match="did not answer within"):
        Sender(0.5, LOCAL).post(server.url, b"{}", {})


def test_the_time_limit_includes_connecting() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, _Deadline(0.01) as deadline:
        time.sleep(0.1)
        deadline.attach(ours)
        theirs.settimeout(5)
        assert theirs.recv(1) == b""


def test_a_closed_port_is_a_failed_delivery() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(SendFailed, match="refused"):
        Sender(5, LOCAL).post(f"http://127.0.0.1:{port}/", b"{}", {})


@pytest.mark.parametrize(
    "url", ["http://localhost:99999/", "http://[::1/", "gopher://localhost/", "http://a..b/"]
)
def test_an_invalid_address_is_a_failed_delivery(url: str) -> None:
    with pytest.raises((SendFailed, AddressUnknown)):
        Sender(5, LOCAL).post(url, b"{}", {})


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate for localhost only, in one file with its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    command += " -addext subjectAltName=DNS:localhost"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


def test_a_certificate_for_another_name_is_refused(certificate: Path) -> None:
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with Receiver(tls=served) as receiver:
        assert Sender(30, LOCAL, trusting).post(receiver.url, b"{}", {}).is_success
        with pytest.raises(SendFailed, match="certificate"):
            Sender(30, LOCAL).post(receiver.url, b"{}", {})
        with pytest.raises(SendFailed, match="certificate"):
            Sender(30, LOCAL, trusting).post(f"https://127.0.0.1:{receiver.port}/", b"{}", {})
        assert len(receiver.received) == 1
