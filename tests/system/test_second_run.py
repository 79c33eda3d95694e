"""scripts/test runs a few failed tests once more, alone, and names them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = (Path(__file__).parents[2] / "scripts" / "test").read_text()
FUNCTION = re.search(r"^retried_max=.*?^}\n", SCRIPT, re.MULTILINE | re.DOTALL)
FAILS_ONCE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(COUNT))
def test_it(number):
    runs = Path(f"runs{number}")
    before = runs.read_text() if runs.exists() else ""
    runs.write_text(before + "x")
    assert before or number >= FAILING
"""


@pytest.mark.parametrize(
    ("failing", "is_mended", "code", "runs"),
    [(0, True, 0, 1), (3, True, 0, 2), (1, False, 1, 2), (4, True, 1, 1)],
)
def test_up_to_three_failed_tests_run_once_more(
    tmp_path: Path, failing: int, is_mended: bool, code: int, runs: int
) -> None:
    assert FUNCTION is not None
    source = FAILS_ONCE.replace("COUNT", "5").replace("FAILING", str(failing))
    if not is_mended:
        source = source.replace("assert before or", "assert")
    (tmp_path / "test_it.py").write_text(source)
    script = (
        f"set -euo pipefail\nbin={Path(sys.executable).parent}\nunsteady=()\n{FUNCTION[0]}"
        'code=0\nrun_tests test_it.py || code=$?\necho "named ${#unsteady[@]}"\n'
        "exit $code\n"
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert f"named {0 if code else failing}\n" in done.stdout
    assert (tmp_path / "runs0").read_text() == "x" * runs
    if failing < 5:
        assert (tmp_path / "runs4").read_text() == "x", "what passed does not run again"
