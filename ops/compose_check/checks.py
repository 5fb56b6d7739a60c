"""Checks the promises of docker-compose.yml, one a function. Each returns what it saw."""

import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable

import redis

from ops.compose_check.backend import HostBackend
from ops.compose_check.project import ROOT, CheckFailed, ComposeProject

IMAGE, OLDER = "check", "check-older"  # tags
SERVERS, ROLES = ("redis", "postgres"), ("worker-cpu", "tasks", "exporter")
BURST = 16


def builds(project: ComposeProject) -> str:
    """Build the image, which all of our services share, with the arguments that compose passes."""
    project.compose("build", "worker-cpu")
    image = f"tokenmill:{IMAGE}"
    label = '{{index .Config.Labels "org.opencontainers.image.version"}} {{.Size}}'
    version, size = project.run(["docker", "image", "inspect", "-f", label, image]).split()
    _expect(version == IMAGE, f"the label names the version {version}")
    find = ["docker", "run", "--rm", "--user", "root", "--entrypoint", "find", image]
    passwords = project.run([*find, "/", "-xdev", "-name", ".env"])
    _expect(not passwords, f"the image has {passwords}")
    told = project.run(["docker", "run", "--rm", image, "--version"]).strip()
    _expect(told.endswith(f"+{IMAGE}"), f"its version is {told}")
    return f"{image}, {int(size) / 1e9:.2f} GB, {told}"


def starts_older(project: ComposeProject, commit: str) -> str:
    """Start the service as an earlier commit left it."""
    folder, packed = project.folder / "older", project.folder / "older.tar"
    folder.mkdir()
    project.run(["git", "-C", str(ROOT), "archive", "-o", str(packed), commit])
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    (folder / ".dockerignore").unlink(missing_ok=True)
    dockerfile = project.folder / "ops/compose_check/older.Dockerfile"
    image = f"tokenmill:{OLDER}"
    newer = f"NEWER=tokenmill:{IMAGE}"
    project.run(
        ["docker", "build", "-f", str(dockerfile), "--build-arg", newer, "-t", image, str(folder)]
    )
    project.change(TOKENMILL_VERSION=OLDER)
    seconds = project.up()
    backend = HostBackend(project.variables)
    jobs = [result.job_id for result in backend.ask()]
    project.wait_until(lambda: backend.rows(jobs) == len(jobs), "the results are in PostgreSQL")
    (project.folder / "older-jobs").write_text("\n".join(jobs))
    short = project.run(["git", "-C", str(ROOT), "rev-parse", "--short", commit]).strip()
    return f"{short}: healthy after {seconds:.0f} s, {_revision(project)}"


def upgrades(project: ComposeProject) -> str:
    """Name another version and call `up`: migrated first, then drained and replaced."""
    backend, before = HostBackend(project.variables), _revision(project)
    told = _change_version(project, IMAGE)
    jobs = (project.folder / "older-jobs").read_text().split()
    _expect(backend.rows(jobs) == len(jobs), "rows of the older version are gone")
    after = _revision(project)
    return f"{before} → {after}; {told}"


def goes_back(project: ComposeProject) -> str:
    """Name the older version again: it runs on the newer schema. Then the newer one."""
    before = _revision(project)
    told = _change_version(project, OLDER)
    after = _revision(project)
    _expect(after == before, f"the schema went from {before} to {after}")
    _change_version(project, IMAGE)
    return f"{after} stays; {told}"


def has_few_rights(project: ComposeProject) -> str:
    """Look at every running container: user, capabilities, root file system, memory, log."""
    most = []
    for service in (*SERVERS, *ROLES):
        (container,) = project.containers(service)
        host, name = container["HostConfig"], container["Name"].lstrip("/")
        status = project.run(["docker", "exec", name, "cat", "/proc/self/status"])
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        _expect(fields["Uid"].split()[0] != "0", f"{service} runs as root")
        _expect(int(fields["CapEff"], 16) == 0, f"{service} has capabilities {fields['CapEff']}")
        _expect(fields["NoNewPrivs"] == "1", f"{service} may gain rights")
        _expect(host["ReadonlyRootfs"] is True, f"the root of {service} can be written")
        _expect(host["Memory"] > 0, f"{service} has no memory limit")
        _expect(host["Init"] is True, f"{service} has no init")
        log = host["LogConfig"]
        rotates = log["Type"] == "json-file" and {"max-size", "max-file"} <= set(log["Config"])
        _expect(rotates, f"the log of {service} grows: {log}")
        used = project.run(["docker", "stats", "--no-stream", "--format", "{{.MemUsage}}", name])
        most.append(f"{service} {used.strip()}")
    return f"no root, no capability, read-only; memory: {', '.join(most)}"


def settings_reach_roles(project: ComposeProject) -> str:
    """TOKENMILL_LOG_FORMAT=json in .env: every role's log is JSON."""
    for service in ROLES:
        (container,) = project.containers(service)
        lines = project.logs(container["Name"].lstrip("/"))
        wrong = [line for line in lines if not line.startswith("{")]
        _expect(bool(lines) and not wrong, f"{service} logs {wrong[:1]}")
    return "the logs of worker, tasks and exporter are JSON"


def answers_a_backend(project: ComposeProject) -> str:
    """Stream jobs of a backend on the host, with the producer's user; read their rows."""
    backend = HostBackend(project.variables)
    results, told = backend.ask_while(lambda: None, tokens=64)
    jobs = [result.job_id for result in results]
    project.wait_until(lambda: backend.rows(jobs) == len(jobs), "the results are in PostgreSQL")
    return f"{told.split(', from')[0]}; {len(jobs)} of {len(jobs)} rows in PostgreSQL"


def survives_restart_of(service: str) -> Callable[[ComposeProject], str]:
    def survives(project: ComposeProject) -> str:
        backend = HostBackend(project.variables)
        results, told = backend.ask_while(lambda: project.compose("restart", "-t", "90", service))
        project.wait_healthy()
        jobs = [result.job_id for result in results]
        project.wait_until(lambda: backend.rows(jobs) == len(jobs), "the results are recorded")
        again = backend.ask(count=1)
        project.wait_until(lambda: backend.client.depth().running == 0, "no job is left running")
        return f"{told}; {len(jobs)} rows; the next job {again[0].status}"

    return survives


def keeps_waiting_jobs(project: ComposeProject) -> str:
    """Restart the queue's server while no worker runs: every waiting job is there, and runs."""
    backend = HostBackend(project.variables)
    project.compose("stop", "worker-cpu")
    jobs = backend.submit(20, tokens=8)
    before = backend.client.depth().num_queued
    project.compose("restart", "redis")
    project.wait_until(lambda: _depth(backend) is not None, "the server answers")
    after = _depth(backend)
    project.up()
    results = [backend.client.result(job, timeout=120) for job in jobs]
    succeeded = sum(result.status == "succeeded" for result in results)
    server = _server(project)
    _expect((before, after, succeeded) == (20, 20, 20), f"{server}: {before}, {after}, {succeeded}")
    return f"{server}: {before} waiting before, {after} after, {succeeded} succeeded"


def drains(project: ComposeProject) -> str:
    """Stop the worker in mid-answer: it ends with 0, and another start continues."""
    backend = HostBackend(project.variables)
    code = -1

    def stop_and_start() -> None:
        nonlocal code
        project.compose("stop", "worker-cpu")
        (container,) = project.containers("worker-cpu")
        code = container["State"]["ExitCode"]
        project.up()

    _, told = backend.ask_while(stop_and_start)
    _expect(code == 0, f"the worker ended with {code}")
    return f"exit status 0; {told}"


def scales(project: ComposeProject) -> str:
    """Start a second worker; a burst is shared, and one that is killed loses nothing."""
    backend = HostBackend(project.variables)
    project.up("--scale", "worker-cpu=2")
    project.wait_until(lambda: len(backend.client.workers()) == 2, "two workers live")
    burst = backend.ask(BURST, tokens=100)
    shares: dict[str, int] = {}
    for result in burst:
        shares[result.worker_id] = shares.get(result.worker_id, 0) + 1
    split = " / ".join(str(share) for share in sorted(shares.values()))
    _expect(len(shares) == 2, f"{split} of a burst of {BURST} to two workers")
    victim = project.containers("worker-cpu")[0]["Name"].lstrip("/")
    _, told = backend.ask_while(lambda: project.run(["docker", "kill", victim]), count=6)
    project.compose("up", "-d", "--scale", "worker-cpu=1")
    project.compose("up", "-d")
    project.wait_healthy()
    return f"a burst of {BURST}: {split}; one of two killed: {told}"


def changes_passwords(project: ComposeProject) -> str:
    """Change the worker's password in mid-answer, with the guide's commands."""
    old, backend = project.variables["REDIS_WORKER_PASSWORD"], HostBackend(project.variables)
    _, told = backend.ask_while(lambda: project.shell(guide_block("# change a password")))
    project.wait_healthy()
    new = project.variables["REDIS_WORKER_PASSWORD"]
    for password, may in ((old, False), (new, True)):
        try:
            _redis(project, "worker", password).ping()
        except redis.AuthenticationError:
            _expect(not may, "the new password is refused")
        else:
            _expect(may, "the old password still works")
    return told


def serves_own_model(project: ComposeProject) -> str:
    """Serve a folder of the host: MODELS_FOLDER and TOKENMILL_MODEL=/models/mine."""
    models = project.folder / "models"
    models.mkdir(mode=0o755)
    (worker,) = project.containers("worker-cpu")
    cached = "/home/tokenmill/.cache/tokenmill/models"
    name = project.run(["docker", "exec", worker["Name"].lstrip("/"), "ls", cached]).split()
    folder = next(each for each in name if "." not in each)
    project.run(
        [
            "docker",
            "cp",
            "-L",
            f"{worker['Name'].lstrip('/')}:{cached}/{folder}",
            str(models / "mine"),
        ]
    )
    for path in models.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    project.change(MODELS_FOLDER=str(models), TOKENMILL_MODEL="/models/mine")
    project.up()
    (result, *_), _ = HostBackend(project.variables, "mine").ask_while(lambda: None, tokens=24)
    project.change(MODELS_FOLDER=None, TOKENMILL_MODEL=None)
    project.up()
    shutil.rmtree(models)
    return f"/models/mine answers as {result.model}"


def is_restored(project: ComposeProject) -> str:
    """Back up both volumes while jobs wait, remove them, restore: the guide's commands."""
    backend = HostBackend(project.variables)
    ended = [result.job_id for result in backend.ask()]
    project.wait_until(lambda: backend.rows(ended) == len(ended), "the results are in PostgreSQL")
    project.compose("stop", "worker-cpu")
    waiting = backend.submit(20, tokens=8)
    project.shell(guide_block("# back up"))
    project.remove()
    project.shell(guide_block("# restore"))
    project.wait_healthy()
    backend = HostBackend(project.variables)
    rows = backend.rows(ended)
    results = [backend.client.result(job, timeout=120) for job in waiting]
    succeeded = sum(result.status == "succeeded" for result in results)
    _expect((rows, succeeded) == (len(ended), 20), f"{rows} rows, {succeeded} of 20 waiting jobs")
    sizes = [f"{name} {(project.folder / name).stat().st_size / 1e3:.0f} kB" for name in BACKUPS]
    return f"{rows} of {len(ended)} rows, {succeeded} of 20 waiting jobs ran ({', '.join(sizes)})"


BACKUPS = ("tokenmill.dump", "redis.tar")


def stops(project: ComposeProject) -> str:
    """Stop everything: each process ends by itself, with 0."""
    project.compose("stop")
    codes = {
        service: [container["State"]["ExitCode"] for container in project.containers(service)]
        for service in (*SERVERS, *ROLES, "migrate")
    }
    _expect({code for each in codes.values() for code in each} == {0}, str(codes))
    return "every exit status is 0"


def guide_block(first_line: str) -> str:
    """Return the commands of the deployment guide's block that begins with this line."""
    guide = (ROOT / "ops/guides/deployment.md").read_text()
    (block,) = re.findall(rf"```sh\n({re.escape(first_line)}.*?)```", guide, re.DOTALL)
    return str(block)


def older_commit() -> str:
    """Return the commit to upgrade from: the last before the newest migration was added.

    Where that commit speaks another version of the wire, which nothing upgrades from, return the
    first that speaks today's.
    """
    versions = "migrations/tokenmill_migrations/versions/0*.py"
    before_migration = _git("log", "-1", "--diff-filter=A", "--format=%H^", "--", versions)
    wire = "schemas/tokenmill_schemas/job.py"
    first_of_wire = _git("log", "-1", "-GSCHEMA_VERSION: Final =", "--format=%H", "--", wire)
    wire_is_newer = _git("merge-base", before_migration, first_of_wire) != first_of_wire
    return first_of_wire if wire_is_newer else before_migration


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _change_version(project: ComposeProject, version: str) -> str:
    def change() -> None:
        project.change(TOKENMILL_VERSION=version)
        project.up()

    _, told = HostBackend(project.variables).ask_while(change)
    for service in ROLES:
        for container in project.containers(service):
            used = container["Config"]["Image"]
            _expect(used == f"tokenmill:{version}", f"{service} runs {used}")
    return told


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise CheckFailed(otherwise)


def _revision(project: ComposeProject) -> str:
    told = project.compose("run", "--rm", "-T", "--no-deps", "migrate", "db", "status")
    return "schema " + " ".join(re.findall(r"\b\d{4}\b", told)[:1])


def _redis(project: ComposeProject, user: str, password: str) -> redis.Redis:
    port = int(project.variables["REDIS_PORT"])
    return redis.Redis(port=port, username=user, password=password, decode_responses=True)


def _server(project: ComposeProject) -> str:
    password = project.variables["REDIS_OPERATOR_PASSWORD"]
    info = _redis(project, "operator", password).info("server")
    name = info.get("server_name", "redis")
    return f"{name} {info.get('valkey_version') or info['redis_version']}"


def _depth(backend: HostBackend) -> int | None:
    try:
        return int(backend.client.depth().num_queued)
    except Exception:  # the server is starting
        return None
