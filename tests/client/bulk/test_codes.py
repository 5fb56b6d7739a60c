"""The guide's table of error codes and the codes that the code gives are the same."""

import ast
import re
from pathlib import Path

import msgspec
import pytest

from tests.client.bulk.support import result
from tokenmill.bulk.formats.output_line import of_result
from tokenmill_schemas.result import JobError, JobStatus
from tokenmill_worker.checking.checker import VIOLATION
from tokenmill_worker.jobs import INTERNAL_ERROR

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "ops" / "guides" / "bulk.md").read_text(encoding="utf-8")
# which argument of each constructor is the code
PLACES = {"BadLine": 2, "FormError": 2, "LineError": 0, "JobError": 0}
PACKAGE = ROOT / "api_client" / "tokenmill"
FILES = [
    *sorted((PACKAGE / "bulk").rglob("*.py")),
    *sorted((PACKAGE / "openai").rglob("*.py")),
]
WORKER_FILES = sorted((ROOT / "worker").rglob("*.py"))


def table() -> dict[str, str]:
    """Return code → what the guide says of the line.

    The last row, of the service's own faults, names no code.
    """
    section = next(part for part in GUIDE.split("\n\n") if "`invalid_json_line`" in part)
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {code: says for codes, says, *_ in rows[1:] for code in re.findall(r"`(\w+)`", codes)}


def codes_in(path: Path) -> set[str]:
    """Return the error codes in a source file: constructor arguments, defaults named `code`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in PLACES
        ):
            named = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            placed = node.args[PLACES[node.func.id] : PLACES[node.func.id] + 1]
            found |= {
                str(part.value) for part in (*named, *placed) if isinstance(part, ast.Constant)
            }
        elif isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args][
                -len(node.args.defaults) or len(node.args.args) :
            ]
            pairs = zip(names, node.args.defaults, strict=True)
            found |= {
                str(value.value)
                for name, value in pairs
                if name == "code" and isinstance(value, ast.Constant)
            }
    return found


def test_the_table_has_exactly_the_codes_of_refused_lines() -> None:
    refusals = {code for code, says in table().items() if "worker refused" not in says} - {
        VIOLATION
    }
    assert refusals == set().union(*map(codes_in, FILES))


@pytest.mark.parametrize("code", ["invalid_request", "context_length_exceeded", "model_not_found"])
def test_a_job_refused_by_the_worker_has_status_400_or_404(code: str) -> None:
    says = table()[code]
    assert "worker refused" in says
    assert answered(code) == (404 if code == "model_not_found" else 400)


def test_every_other_job_error_has_status_500() -> None:
    """Every code that the guide's table does not name is answered with status 500."""
    named = {INTERNAL_ERROR, "engine_error", "corrupt_log"}
    of_jobs = set().union(*map(codes_in, WORKER_FILES)) | named
    others = of_jobs - table().keys()
    assert {INTERNAL_ERROR, "engine_error", "dead"} <= others
    assert {code: answered(code) for code in others} == dict.fromkeys(others, 500)
    assert {code for code, says in table().items() if answered(code) != 500} == {
        code for code, says in table().items() if "worker refused" in says
    }


def answered(code: str) -> int:
    failed = result("batch_1", 1, JobStatus.FAILED, error=JobError(code, "because"))
    line = msgspec.json.decode(of_result("batch_1", failed).data)
    status: int = line["response"]["status_code"]
    assert line["response"]["body"]["error"]["code"] == code
    return status
