"""Tests of `tokenmill doctor`: a model before it is loaded or fetched, and a database file."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.valkey import ControlledValkey
from tokenmill_worker.engines.own.config import machine
from tokenmill_worker.local import doctor
from tokenmill_worker.local.doctor import examine, show
from tokenmill_worker.local.findings import Finding
from tokenmill_worker.local.redis_checks import with_address
from tokenmill_worker.record.migrate import upgrade
from tokenmill_worker.settings import load_settings


def model_finding(model: str, database: Path) -> tuple[str, str]:
    settings = load_settings(
        {
            "model": model,
            "redis_url": "redis://127.0.0.1:1/0",
            "database_url": f"sqlite:///{database}/none.db",
        }
    )
    (found,) = [finding for finding in examine(settings) if finding.subject == "model"]
    return found.severity, found.words


def test_doctor_reads_the_header_of_a_model_file(tmp_path: Path) -> None:
    good, bad, folder = tmp_path / "good.gguf", tmp_path / "bad.gguf", tmp_path / "folder"
    good.write_bytes(b"GGUF\x03\0\0\0")
    bad.touch()
    folder.mkdir()
    assert model_finding(str(good), tmp_path) == ("ok", str(good))
    assert model_finding(str(bad), tmp_path) == ("error", f"{bad} is no GGUF file")
    assert model_finding(str(folder), tmp_path)[0] == "error"


@pytest.mark.parametrize(
    ("folder", "gib", "expected"),
    [
        ("disk", 0.001, ("ok", "cache_disk {0}/disk may take 0.001 GiB, and there are ")),
        ("disk", 1e9, ("warning", "cache_disk {0}/disk may take 1e+09 GiB, and there are ")),
        (
            "file/disk",
            1,
            ("error", "cache_disk {0}/file/disk cannot be used: {0}/file is no folder"),
        ),
        (None, 1, None),
    ],
)
def test_doctor_checks_the_room_of_a_cache_on_disk_and_makes_nothing(
    tmp_path: Path, folder: str | None, gib: float, expected: tuple[str, str] | None
) -> None:
    (tmp_path / "file").touch()
    given = {"model": str(tmp_path), "database_url": f"sqlite:///{tmp_path}/none.db"}
    chosen = {"cache_disk": str(tmp_path / folder), "cache_disk_gib": gib} if folder else {}
    settings = load_settings({**given, **chosen}, strict=False)
    found = [finding for finding in examine(settings) if finding.subject == "disk"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    if expected is None:
        assert found == []
        return
    severity, words = expected
    assert found[0].severity == severity
    assert found[0].words.startswith(words.format(tmp_path))


def test_doctor_counts_the_files_of_a_cache_on_disk_from_which_one_vanishes(tmp_path: Path) -> None:
    (tmp_path / "held.kv").write_bytes(bytes(1000))
    (tmp_path / "gone.kv").symlink_to(tmp_path / "nothing")
    given = {"model": str(tmp_path), "database_url": f"sqlite:///{tmp_path}/none.db"}
    chosen = {"cache_disk": str(tmp_path), "cache_disk_gib": 0.001}
    found = examine(load_settings({**given, **chosen}, strict=False))
    assert [finding.severity for finding in found if finding.subject == "disk"] == ["ok"]


def test_doctor_lists_the_engine_s_abilities(tmp_path: Path) -> None:
    def of(model: str) -> str:
        given = {"model": model, "database_url": f"sqlite:///{tmp_path}/none.db"}
        settings = load_settings(given, strict=False)
        (found,) = [item.words for item in examine(settings) if item.subject == "engine"]
        return found

    assert "response_format.json_schema" in of(str(tmp_path))
    assert of("synthetic") == "synthetic, with scores, prompt_logprobs, adapters, exact_resume"


def test_the_settings_that_are_given_are_named_by_the_engine_that_has_them(tmp_path: Path) -> None:
    given = {
        "database_url": f"sqlite:///{tmp_path}/t.db",
        "quantization": "int8",
        "max_num_seqs": 9,
    }
    settings = load_settings(given | {"webhook_secret": "whsec_" + "A" * 32}, strict=False)
    found = [item.words for item in examine(settings) if item.subject == "settings"]
    assert set(found) == {
        f"Worker: database_url=sqlite:///{tmp_path}/t.db",
        "Engine: max_num_seqs=9",
        "Engine: own: quantization=int8",
        "Tasks: webhook_secret=***",
    }


@pytest.mark.parametrize("name", ["none.gguf", "none", "models/none"])
def test_a_missing_path_is_not_taken_for_a_hub_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert model_finding(str(path), tmp_path) == ("error", f"{path}: No such file or directory")
    assert model_finding("organisation/model", tmp_path)[0] == "warning"


@pytest.mark.parametrize("name", ["synthetic", "synthetic?step_ms=5"])
def test_the_synthetic_model_is_not_looked_up_on_the_hub(tmp_path: Path, name: str) -> None:
    assert model_finding(name, tmp_path) == (
        "ok",
        f"{name} needs no weights: its answers are noise, for tests",
    )


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("versions", [{"flash-attn-4": "4.0.0b36"}, {"flash-attn": "2.8.3"}, {}])
def test_missing_gpu_packages_are_named_and_flash_attn_is_optional(
    versions: dict[str, str], has_triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    find = SimpleNamespace(find_spec=lambda name: object() if has_triton else None)
    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(util=find))
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "?"))
    monkeypatch.setattr(doctor, "_model", lambda _: iter(()))  # its imports keep what they find
    settings = load_settings(
        {"redis_url": "redis://127.0.0.1:1/0", "database_url": f"sqlite:///{tmp_path}/none.db"}
    )
    found = [one for one in examine(settings) if one.subject == "gpu"]
    expected = [] if has_triton else [("warning", "triton is not installed")]
    expected += [
        ("ok", f"{name} {version} is installed, and has not been measured here: attention auto")
        for name, version in versions.items()
    ]
    assert len(found) == len(expected)
    for one, (severity, words) in zip(found, expected, strict=True):
        assert one.severity == severity
        assert one.words.startswith(words)


def test_doctor_reports_the_threads_and_cores_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "none")
    first = next(iter(doctor._machine(load_settings({}))))
    assert first.words == f"{torch.__version__}, 1 thread on 1 core"


@pytest.mark.parametrize("options", ["", "?timeout=5"])
def test_options_of_a_database_url_are_not_part_of_the_file_name(
    tmp_path: Path, options: str
) -> None:
    url = f"sqlite:///{tmp_path}/t.db{options}"
    settings = load_settings({"redis_url": "redis://127.0.0.1:1/0", "database_url": url})
    before = [
        finding.severity
        for finding in examine(settings, servers_only=True)
        if finding.subject == "sql"
    ]
    upgrade(url)
    after = [
        finding.severity
        for finding in examine(settings, servers_only=True)
        if finding.subject == "sql"
    ]
    assert (before, after) == (["error"], ["ok", "ok"])


def test_an_unreachable_server_is_reported_once() -> None:
    address = "127.0.0.1:1"
    settings = load_settings(
        {"redis_url": f"redis://{address}/0", "database_url": f"postgresql://{address}/t"}
    )
    redis, sql = (finding.words for finding in examine(settings, servers_only=True))
    assert redis == f"cannot reach Redis at {address}: Connection refused"
    assert sql.count("127.0.0.1") == 1
    assert with_address("redis://at/0", "Redis refuses this user") == (
        "redis://at/0: Redis refuses this user"
    )


def test_long_findings_are_wrapped_between_words_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("redis", "error", "word " * 20 + "end", "start it, and " * 5 + "wait")]
    show(found)
    assert len(capsys.readouterr().out.splitlines()) == 4  # finding, hint, and the sum
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "0")
    monkeypatch.setenv("COLUMNS", "40")
    show(found)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    first, *others = lines[:-2]
    assert first == "✗ redis    word word word word word word"
    assert all(len(line) <= 40 for line in lines)
    assert all(line.startswith(" " * 11 + line.strip()[:1]) for line in others)
    assert " ".join(line.strip() for line in others).endswith("end → " + found[0].hint)


MAY_NOT_READ = "this user may not read its version, eviction policy and persistence (INFO)"
MAY_NOT_ASK = "this user may not ask if a restart keeps what scripts wrote (ACL DRYRUN)"


@pytest.mark.redis
@pytest.mark.parametrize(
    ("user", "warnings"),
    [
        ("producer", [MAY_NOT_READ]),
        ("reader", []),
        ("tasks", [MAY_NOT_ASK]),
        ("worker", []),
        ("operator", []),
    ],
)
def test_each_shipped_user_gets_no_errors_and_its_expected_warnings(
    make_valkey: Callable[..., ControlledValkey], tmp_path: Path, user: str, warnings: list[str]
) -> None:
    rules = tmp_path / "users.acl"
    rules.write_text((Path(__file__).parents[2] / "ops/deploy/redis/users.acl").read_text())
    server = make_valkey(settings={"aclfile": str(rules)})
    address = server.url.replace("://", f"://{user}:change-me-{user}@")
    upgrade(f"sqlite:///{tmp_path}/t.db")
    settings = load_settings(
        {"redis_url": address, "database_url": f"sqlite:///{tmp_path}/t.db", "queue": "q"}
    )
    found = examine(settings, servers_only=True)
    assert [one.words for one in found if one.severity != "ok"] == warnings
    assert [one.words for one in found if one.subject == "queue"] == [
        "q: 0 waiting, 0 running, 0 workers"
    ]
    with server.client(username="operator", password="change-me-operator") as operator:
        names = {entry["object"] for entry in operator.acl_log()}
    assert names <= {"info", "acl|dryrun", "time"}


def test_doctor_checks_the_servers_without_importing_torch() -> None:
    code = (
        "import sys; from tokenmill_worker.cli import app\n"
        "try: app(['doctor', '--quiet', '--redis-url', 'redis://127.0.0.1:1/0'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
