"""Versions of a request: a worker refuses one that needs a later version than it reads.

A worker ignores fields that it does not know. So that no answer leaves out what was asked for, a
request carries the least version whose workers honour each of its fields.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Final

from tokenmill_schemas.job import JobRequest

SCHEMA_VERSION: Final = 1  # the newest version that this code reads
# fields that version 1 lacks, as `NAME` or `params.NAME`, with the version that added each
ADDED_IN: Final[Mapping[str, int]] = {}
_NEUTRAL: Final = JobRequest(job_id="")


def wire_version(request: JobRequest, added_in: Mapping[str, int] = ADDED_IN) -> int:
    """Return the least version whose workers honour every field of the request."""
    needed = (
        version
        for name, version in added_in.items()
        if attrgetter(name)(request) != attrgetter(name)(_NEUTRAL)
    )
    return max(needed, default=1)
