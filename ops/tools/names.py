"""Checks names: no retired word or definition comes back, and no class name is defined twice.

A retired word is a term of an earlier version that readers of vLLM, Celery or Redis do not know.
`RETIRED` says what to write instead. A retired definition is a class or function whose name was
such a term, or said too little; the word itself stays free elsewhere. A word
that is also another field's term stays in the files of `EXCEPTIONS` alone. A test is named after
what it asserts, by subject, condition and result: `PERSONIFICATIONS` lists words that no definition
of a test may have, and `RIDDLE` matches names without a subject.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

THIS_FILE = "ops/tools/names.py"  # lists the retired words
CHECKED = ("api_client", "migrations", "ops", "schemas", "worker", "tests")
RETIRED = {
    "bell": "wake-up channel",
    "bury": "mark dead",
    "courier": "webhook delivery",
    "demotion": "failover",
    "desk": "resources",
    "detour": "enable adapters",
    "findable": "cached",
    "hands": "owned jobs",
    "intake": "validation",
    "lane": "tenant stream",
    "lanes": "tenant streams",
    "outlet": "frame writer",
    "patience": "retry window",
    "pulse": "watchdog",
    "stray": "unacknowledged delivery",
    "tally": "histogram",
    "tether": "child process guard",
    "untold": "undelivered",
    "voucher": "ownership version",
    "vouchers": "ownership versions",
}
# Classes and functions of the product, each with what took its place.
RETIRED_DEFINITIONS = {
    "AppendCalls": "AppendBatch",
    "HeldConnection": "PipelinedConnection",
    "Wire": "RawRedisProtocol",
    "ChannelHub": "PubSubMultiplexer",
    "StreamCursor": "StreamPosition",
    "Cursor": "PageToken",
    "Admission": "InputProcessor or SequenceAdmission",
    "Verdict": "Severity, AdmissionResult or ErrorKind",
    "Claims": "JobSource",
    "Beats": "HeartbeatSender",
    "Recorder": "ResultRecorder",
    "Watcher": "JobObserver",
    "Watch": "WorkerStatus",
    "Reading": "MetricSample",
    "Story": "JobSpan",
    "Timeline": "JobTimestamps",
    "Recent": "RollingPercentiles",
    "Stoppable": "ManagedProcess",
    "Standing": "OutboxBacklog or SchemaVersion",
    "NotYet": "Reschedule",
    "Terms": "BatchDefaults",
    "Stage": "RetryQueue",
    "Threads": "BlockingCalls",
    "Tell": "Emit",
    "Follow": "StreamMessages",
    "Listen": "Subscribe",
    "LookUp": "QueryDatabase",
    "QueueView": "QueueContext",
    "Pump": "BatchFeeder",
    "Pacing": "RunLimits",
    "Survey": "FileSummary",
    "Marks": "LineSet",
    "Target": "ConnectionOptions, HttpTarget or CacheTarget",
    "Preparing": "PendingRequests",
    "Needs": "Prerequisites",
    "Steps": "StepExecutor",
    "Step": "StepDraft, KernelCall or BroadcastStep",
    "Pace": "StepTimeModel",
    "Found": "CachedPrefix",
    "StepMoves": "StepCopies",
    "Frames": "FrameReader",
    "Broken": "EngineFailed",
    "Arena": "HugePageArena",
    "Draws": "PreparedSampling",
    "Drawer": "SamplingBackend",
    "Drawing": "SamplingArrays",
    "Trait": "ParamFlags",
    "RowTable": "ParameterTable",
    "Share": "RowSpan or SequenceBatch",
    "Wholeness": "FusionSwitch",
    "DirectForward": "WholePass",
    "Turns": "RotatingBuffers",
    "let_go": "release_ownership",
    "strike_off": "deregister_worker",
    "is_spoilt": "is_wrong_type",
    "begin_again": "reset_log",
    "ring_all": "wake_all",
    "call_workers": "wake_workers",
    "in_turn": "split_batches",
    "hand_in": "submit",
    "straight": "disable_adapters",
    "only_prepares": "waits_only",
    "without_bombs": "reject_oversized",
    "heeding_cancellation": "reraise_cancellation",
    "leave_replicas": "reconnect_on_readonly",
    "Observer": "JobTelemetry",
    "Team": "PoolThread",
    "each_handed_in": "parallel_for_commit",
}
# Classes and functions of tests, each with what took its place.
RETIRED_IN_TESTS = {
    "Arena": "FaultInjector",
    "Audience": "Subscribers",
    "Crowd": "Load",
    "Desk": "JobSink or BulkSetup",
    "Told": "Received",
    "Troop": "WorkerGroup",
    "rage": "inject_faults",
    "verdict": "find_violations",
}
# Words that a definition of a test may not have: it is named after what is asserted.
PERSONIFICATIONS = frozenset({
    "guilty", "hear", "heard", "hears", "innocent", "knew", "know", "knows", "learns", "obeyed",
    "obeys", "said", "say", "says", "tell", "tells", "told",
})  # fmt: skip
# A test's name that begins with a pronoun, or calls an invalid thing one "that is none".
RIDDLE = re.compile(r"test_(?:it|they|what|whatever)_|_theirs\b|_that_(?:is|are)_none(?:_|\b)")
PYTHON_DEFINITION = re.compile(r"\s*(?:class|(?:async )?def)\s+(\w+)")
LUA_DEFINITION = re.compile(r"\s*(?:local\s+)?function\s+(\w+)")
CPP_DEFINITION = re.compile(r"\s*(?:(?:class|struct)|(?:INLINE |static )*[\w:<>]+ [*&]?)\s*(\w+)")
DEFINITIONS = {".lua": LUA_DEFINITION, ".cpp": CPP_DEFINITION, ".h": CPP_DEFINITION}
# lanes of a GPU's warp
EXCEPTIONS = {
    "worker/tokenmill_worker/engines/own/cuda/draw_cut.py": {"lane", "lanes"},
    "worker/tokenmill_worker/engines/own/cuda/draw_kernel.py": {"lane", "lanes"},
}
# A word stands alone, or is a part of a snake_case or CamelCase name.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def retired_words(text: str, allowed: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, word) of each retired word that is not allowed in this file."""
    for number, line in enumerate(text.splitlines(), 1):
        words = {word.lower() for word in _WORD.findall(line.replace("hands over", "gives"))}
        for word in sorted(words & RETIRED.keys() - allowed):
            yield number, word


def retired_definitions(text: str, suffix: str, retired: dict[str, str]) -> Iterator[str]:
    """Yield "line: problem" for each class or function that is defined under a retired name."""
    pattern = DEFINITIONS.get(suffix, PYTHON_DEFINITION)
    for number, line in enumerate(text.splitlines(), 1):
        found = pattern.match(line)
        if found and found[1] in retired:
            yield f"{number}: {found[1]!r} is retired: use {retired[found[1]]}"


def unclear_test_names(text: str) -> Iterator[str]:
    """Yield "line: problem" for each definition of a test that lets a thing speak or know, or has
    no subject.
    """
    for number, line in enumerate(text.splitlines(), 1):
        found = PYTHON_DEFINITION.match(line)
        if found is None:
            continue
        for word in sorted({word.lower() for word in _WORD.findall(found[1])} & PERSONIFICATIONS):
            yield f"{number}: {word!r} in {line.split('(')[0].strip()!r}: name what is asserted"
        if RIDDLE.search(found[1]):
            yield f"{number}: {found[1]} has no subject: name subject, condition and result"


def classes(text: str) -> list[str]:
    """Return the names of a file's classes."""
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def problems_of(name: str, text: str) -> Iterator[str]:
    """Yield a sentence for each retired definition and word of one file."""
    suffix = Path(name).suffix
    is_test = name.startswith("tests/")
    retired = RETIRED_IN_TESTS if is_test else RETIRED_DEFINITIONS
    for problem in retired_definitions(text, suffix, retired):
        yield f"{name}:{problem}"
    if is_test:
        yield from (f"{name}:{problem}" for problem in unclear_test_names(text))
    elif suffix in (".py", ".lua"):
        for line, word in retired_words(text, EXCEPTIONS.get(name, set())):
            yield f"{name}:{line}: {word!r} is retired: write {RETIRED[word]!r}"


def problems(files: dict[str, str]) -> Iterator[str]:
    """Yield a sentence for each retired name, and for each class of the product defined twice."""
    defined: dict[str, list[str]] = defaultdict(list)
    for name, text in files.items():
        yield from problems_of(name, text)
        if name.endswith(".py") and not name.startswith("tests/"):
            for found in classes(text):
                defined[found].append(name)
    for found, names in sorted(defined.items()):
        if len(names) > 1:
            yield f"class {found} is defined in {', '.join(names)}: give each a name of its own"


def main(root: Path) -> int:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *CHECKED]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    paths = [name for name in listed.split("\0") if name.endswith((".py", ".lua", ".cpp", ".h"))]
    files = {
        name: (root / name).read_text("utf-8")
        for name in paths
        if name != THIS_FILE and (root / name).exists()
    }
    found = list(problems(files))
    print("\n".join(found) or "no problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
