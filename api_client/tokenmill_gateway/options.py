"""The options that the commands of the gateway share."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer


def variable(name: str, help_text: str, **more: Any) -> Any:
    return typer.Option(envvar=f"TOKENMILL_{name}", help=help_text, **more)


RedisUrl = Annotated[str, variable("REDIS_URL", "URL of the Redis or Valkey server.")]
DatabaseUrl = Annotated[
    str, variable("DATABASE_URL", "URL of the database with the results and the keys.")
]
KeySecret = Annotated[
    str, variable("GATEWAY_KEY_SECRET", "Secret of the hashes of keys; the same everywhere.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyPrefix = Annotated[str, variable("KEY_PREFIX", "Prefix of all keys in Redis.")]
REDIS: Final = "redis://localhost:6379/0"
DATABASE: Final = "sqlite:///tokenmill.db"
