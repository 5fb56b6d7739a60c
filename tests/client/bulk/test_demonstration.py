"""`ops/demo bulk` with a model-free engine: killed on the way, called again, each line answered
once.
"""

from pathlib import Path

import pytest

from tests.e2e.test_demo import Demo

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(240)]


def test_the_bulk_demonstration_is_killed_resumes_and_answers_each_line_once(
    tmp_path: Path,
) -> None:
    demo = Demo(tmp_path, "bulk", "--lines", "300")
    try:
        demo.wait_for("each line once")
        assert demo.process.wait(60) == 0
        assert "killed (SIGKILL) with " in demo.output
        assert "300 lines in, answers: 297, errors: 3" in demo.output
        assert demo.wait_for_nobody(30) == []
    finally:
        for process in demo.family():
            process.kill()
        demo.process.wait()
