"""The settings of a worker, as one class.

A setting is a field below, or one of a kind of engine. Each is the variable TOKENMILL_<NAME> and
the flag --<name>. `loading` reads and checks them.
"""

from __future__ import annotations

import os
import re
import socket
import typing
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, create_model, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES
from tokenmill_schemas.keys import queue_of
from tokenmill_worker.contract.engine_kind import EngineConfigError
from tokenmill_worker.contract.name_table import read_table
from tokenmill_worker.engines import KINDS, kind_for, kind_named

PREFIX = "TOKENMILL_"
DEFAULT_MODEL = "smollm2-135m-instruct"
# Defaults that differ from those of an engine used alone, because a service's jobs have classes and
# tenants.
_DEFAULTS: dict[str, Any] = {"model": DEFAULT_MODEL, "policy": "priority"}
# the kinds of engine that have a setting, by the setting's name
ENGINE_FIELDS: dict[str, tuple[str, ...]] = {
    name: tuple(kind for kind in KINDS if name in kind_named(kind).settings)
    for first in KINDS
    for name in kind_named(first).settings
}
_CONFIG = SettingsConfigDict(
    env_prefix=PREFIX,
    env_ignore_empty=True,
    env_parse_none_str="none",
    extra="forbid",
    frozen=True,
    allow_inf_nan=False,
)
Seconds = Annotated[float, Field(le=1e9)]
Days = Annotated[float, Field(le=36_500)]


def _field_of_kind(name: str) -> tuple[Any, Any]:
    """Return the type and the field of a setting, as the first kind that has it defines it."""
    config = kind_named(ENGINE_FIELDS[name][0]).config
    field = config.__dataclass_fields__[name]
    default = _DEFAULTS.get(name, field.default)
    return typing.get_type_hints(config)[name], Field(default, description=field.metadata["help"])


if TYPE_CHECKING:

    class _EngineFields(BaseSettings):  # those that the worker reads
        model: str
        adapters: str
        engine_arg: str
        trust_remote_code: bool
else:
    _EngineFields = create_model(
        "_EngineFields",
        __base__=BaseSettings,
        **{name: _field_of_kind(name) for name in ENGINE_FIELDS},
    )


class Settings(_EngineFields):
    """The settings of a worker. Durations are seconds. A field's description is its help text on
    the command line.
    """

    model_config = _CONFIG

    # where
    redis_url: str = Field(
        "redis://localhost:6379/0", description="Redis or Valkey: redis://, rediss:// or unix://"
    )
    database_url: str = Field(
        "sqlite:///tokenmill.db", description="SQL store: sqlite:///FILE or postgresql://"
    )
    queue: str = Field("", description="queue to serve (default: the model's name)")
    key_prefix: str = Field("tm:", description="first part of every Redis key")
    worker_id: str = Field(
        "", description="a name that no other worker has (default: host name and process id)"
    )
    cache_dir: str | None = Field(
        None, description="folder of converted models and kernels (default: ~/.cache/tokenmill)"
    )
    aliases: str = Field(
        "", description="further names of the model and its adapters: name=target,name=target"
    )
    chat_template: str | None = Field(
        None, description="file with a chat template (default: the model's own)"
    )
    reasoning_format: Literal["auto", "none", "think", "channels"] = Field(
        "auto",
        description="how the model marks its thoughts: auto (as its template and tokens say), "
        "none, think (tags), channels (gpt-oss)",
    )
    tool_format: Literal[
        "auto", "none", "hermes", "llama3", "mistral", "deepseek", "xml", "pythonic", "channels"
    ] = Field(
        "auto", description="how the model writes tool calls: auto (as its template says), or none"
    )
    # the promise
    lease_seconds: float = Field(
        10.0,
        ge=0.5,
        le=3600,
        description="after this long without heartbeat a worker's jobs go to others",
    )
    drain_seconds: Seconds = Field(
        30.0, ge=0, description="after SIGTERM, running jobs may finish within this time"
    )
    max_crashes: int = Field(
        3, ge=1, description="a job that crashed the engine this many times is set aside as dead"
    )
    result_ttl_seconds: Seconds = Field(
        3600, gt=0, description="time that Redis keeps a result; SQL keeps it for good"
    )
    idempotency_ttl_seconds: Seconds = Field(
        86_400, gt=0, description="an idempotency key is valid for this long after its job's end"
    )
    # limits
    queue_limit: int = Field(
        0,
        ge=0,
        description=(
            "submit is refused when this many jobs of its priority wait and are due; 0: no limit"
        ),
    )
    max_payload_bytes: int = Field(
        MAX_PAYLOAD_BYTES,
        ge=1024,
        le=MAX_PAYLOAD_BYTES,
        description="size of the largest job request",
    )
    default_max_tokens: int | None = Field(
        None, ge=1, description="answer length of jobs without max_tokens (default: model's length)"
    )
    tenant_max_running: int = Field(
        0, ge=0, description="jobs of one tenant that run at once; 0: no limit"
    )
    tenant_jobs_per_minute: float = Field(
        0.0, ge=0, description="jobs of one tenant that are admitted per minute; 0: no limit"
    )
    bulk_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of free places that go to bulk jobs first, while bulk jobs wait",
    )
    chunk_tokens: int = Field(
        1, ge=1, description="tokens per chunk when n is 1; the first token is sent at once"
    )
    # recording
    record_prompts: bool = Field(False, description="store prompts in the jobs table")
    # `tokenmill tasks`: the gateway's files, webhooks, sums, retention
    files: str = Field(
        "", description="folder or s3://BUCKET of the gateway's files, whose batches tasks run"
    )
    tasks_broker_url: str = Field("", description="Celery's broker (default: TOKENMILL_REDIS_URL)")
    webhook_secret: str = Field(
        "", description="secret that signs webhooks, whsec_…; several: the newest first"
    )
    webhook_networks: str = Field(
        "", description="private networks that webhooks may reach, as 10.0.0.0/8,192.168.1.7"
    )
    retain_payload_days: Days = Field(
        0.0, ge=0, description="how long prompts and answers stay in SQL; 0: for ever"
    )
    retain_job_days: Days = Field(0.0, ge=0, description="how long jobs' rows stay; 0: for ever")
    retain_usage_days: Days = Field(
        0.0, ge=0, description="how long usage of single jobs stays (not sums by day); 0: for ever"
    )
    # watching
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug, info, warning, error"
    )
    log_format: Literal["text", "json"] = Field("text", description="text or json")
    log_prompts: bool = Field(False, description="write prompts and answers to the log")
    metrics_host: str = Field("127.0.0.1", description="address of /healthz, /readyz and /metrics")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of these pages; 0: any free one (default: not served)",
    )
    otel_endpoint: str = Field(
        "", description="trace collector with OTLP over HTTP: http://host:4318 (default: no traces)"
    )
    stall_seconds: Seconds = Field(
        120.0, ge=1, description="an engine without a report for this long is replaced"
    )
    engine: str = Field(
        "",
        description="own, vllm, synthetic for tests (it has no weights and answers with noise), or "
        "a package of yours, as my_package.my_engine (default: by the model's name)",
    )
    engine_python: str = Field(
        "", description="Python of the engine's own environment (default: the worker's)"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _none_is_no_text(cls, value: object, info: ValidationInfo) -> object:
        is_text = (
            info.field_name is not None and cls.model_fields[info.field_name].annotation is str
        )
        return "" if value is None and is_text else value

    @property
    def queue_name(self) -> str:
        return self.queue or queue_of(self.model)

    @property
    def worker_name(self) -> str:
        return self.worker_id or f"{socket.gethostname()}-{os.getpid()}"

    @property
    def engine_kind(self) -> str:
        return self.engine or kind_for(self.model)

    def engine_config(self) -> Any:
        """Return the settings of the engine, as its kind defines them: those that are given, and
        the defaults of a service. Raises EngineConfigError.
        """
        kind = kind_named(self.engine_kind)
        if unknown := set(kind.settings) - set(ENGINE_FIELDS):
            names = " and ".join(sorted(unknown))
            raise EngineConfigError(
                [f"engine {self.engine_kind} names settings that no worker has: {names}"]
            )
        given = self.model_fields_set | _DEFAULTS.keys()
        return kind.config(**{name: getattr(self, name) for name in kind.settings if name in given})

    @property
    def adapter_names(self) -> frozenset[str]:
        return frozenset(read_table(self.adapters, "name=folder"))

    @property
    def networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Parse `webhook_networks`. Raises ValueError with the word that is no network."""
        return tuple(
            ip_network(word.strip()) for word in self.webhook_networks.split(",") if word.strip()
        )

    def public(self) -> dict[str, object]:
        """Return every value with passwords masked, for people and logs."""
        values = {name: masked(getattr(self, name)) for name in type(self).model_fields}
        return values | {"webhook_secret": "***" if self.webhook_secret else ""}

    def variables(self) -> dict[str, str]:
        """Return the environment from which `load_settings` reads these settings again, for child
        processes.
        """
        return {
            variable_of(name): _text(value)
            for name, value in self.model_dump(exclude_unset=True).items()
        }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in (None, "") else str(value)  # an empty variable counts as unset


_HOSTS = re.compile(
    r"(\[[0-9a-fA-F:.]+\]|[^:/?#\[\]@,]*)(:\d*)?(,([^:/?#,]*|\[[0-9a-fA-F:.]+\])(:\d*)?)*([/#][^?]*)?(\?.*)?"
)


def masked(value: object) -> object:
    """Return a URL without its password and the values of its options, where one may stand too. If
    its parts cannot be told apart, only the scheme is shown.
    """
    if not isinstance(value, str) or "://" not in value:
        return value
    scheme, _, rest = value.partition("://")
    user, _, hosts = rest.rpartition("@")
    hosts = re.sub(r"(?<=[?&])([^=&]*=)[^&]*", r"\1***", hosts)
    if _HOSTS.fullmatch(hosts) is None:
        return f"{scheme}://***"
    name, colon, _ = user.partition(":")
    login = f"{name}{':***' if colon else ''}@" if user else ""
    return f"{scheme}://{login}{hosts}"


def variable_of(name: str) -> str:
    return PREFIX + name.upper()
