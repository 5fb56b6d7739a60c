"""Decides which addresses a webhook may go to: public ones, and networks that the operator allows.

The submitter of a job chooses the URL, so a webhook must not give access to our own network. The
name is resolved once, every address is checked, and the connection goes to a checked address and
not to the name. A name that resolves differently the second time gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Networks that are not globally reachable, or withdrawn, by IANA's registries of special-purpose
# addresses. Python's own list may lack them.
_NOT_PUBLIC: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48", "100:0:0:1::/64", "2001:2::/48",
        "2001:10::/28", "3fff::/20", "5f00::/16", "fec0::/10",
    )
)  # fmt: skip
# anycast: PCP, TURN
_PUBLIC: Final = tuple(ipaddress.ip_address(text) for text in ("192.0.0.9", "192.0.0.10"))
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class AddressRefused(Exception):
    """The URL leads to an address that webhooks may not reach."""


class AddressUnknown(Exception):
    """The name has no address at present."""


def resolve(host: str, port: int, allowed: Sequence[Network] = ()) -> list[str]:
    """Return the host's addresses, all of them permitted. Raises AddressRefused, AddressUnknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressUnknown(f"{host} has no address: {error}") from error
    texts = list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    for text in texts:
        address = ipaddress.ip_address(text)
        if not is_permitted(address, allowed):
            raise AddressRefused(
                f"{_named(host, address)} is not public: TOKENMILL_WEBHOOK_NETWORKS of "
                "`tokenmill tasks` lists the private networks that webhooks may reach"
            )
    return texts


def _named(host: str, address: Address) -> str:
    return str(address) if host == str(address) else f"{host}'s address {address}"


def is_permitted(address: Address, allowed: Sequence[Network] = ()) -> bool:
    """Return whether the address is public or in an allowed network. The same must hold for an IPv4
    address that an IPv6 address carries.
    """
    carried = _carried(address)
    reached = carried if address in _NAT64 else [address, *carried]
    return all(_is_public(one) or any(one in network for network in allowed) for one in reached)


def _is_public(address: Address) -> bool:
    if address in _PUBLIC:
        return True
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _carried(address: Address) -> list[Address]:
    if isinstance(address, ipaddress.IPv4Address):
        return []
    carried: list[Address] = [
        one for one in (address.ipv4_mapped, address.sixtofour) if one is not None
    ]
    if address.teredo is not None:
        carried += address.teredo
    if address in _NAT64:
        carried.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return carried
