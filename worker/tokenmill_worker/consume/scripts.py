"""The worker's Lua scripts, each joined with the helpers it needs. The head of each file in lua/
describes its arguments and its reply.
"""

from tokenmill.transport.scripts import COMMON, Script, load_script

_OWNERSHIP = ("tokenmill_worker.consume", "ownership")


def _script(*names: str) -> Script:
    return load_script(COMMON, _OWNERSHIP, *(("tokenmill_worker.consume", name) for name in names))


CLAIM = _script("delivery", "fair_queue", "claim")
APPEND = load_script(
    ("tokenmill_worker.consume", "append")
)  # the hot path carries nothing it does not use
FINISH = _script("finish")
RELEASE = _script("release")
HEARTBEAT = _script("heartbeat")
RESIGN = _script("resign")

ALL = (CLAIM, APPEND, FINISH, RELEASE, HEARTBEAT, RESIGN)
