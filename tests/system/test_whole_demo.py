"""scripts/whole-demo on a slice of real data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster_here import PARTITIONS

ROOT = Path(__file__).parents[2]
FLIGHTS_CSV = ROOT / "tests" / "data" / "flights-2013-01.csv.zip"
ROWS = 3000
DAMAGES = 10


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_damages_differences_and_a_cut_end_with_0(tmp_path: Path) -> None:
    done = subprocess.run(
        (
            sys.executable, str(ROOT / "examples" / "demos" / "whole_demo.py"), "--csv",
            str(FLIGHTS_CSV), "--rows", str(ROWS), "--damages", str(DAMAGES),
        ),
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {
            "TMPDIR": str(tmp_path), "DCPD_PARTITIONS": str(PARTITIONS), "PYTHONPATH": ".:tests",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    title, _, *lines = done.stdout.splitlines()
    assert title == "whole-demo: all equal, nothing damaged"
    rows = [re.fullmatch(r"  (\S.*?)  +([\d,]+) +([\d,]+)  (.+)", line) for line in lines]
    found = {row[1]: (int(row[2].replace(",", "")), row[3], row[4]) for row in rows if row}
    assert [(name, *figures[:2]) for name, figures in found.items()] == [
        ("nodes", ROWS, "0"), ("n2's store", DAMAGES, "0"), ("mirror", ROWS, "0"),
        *([] if "no Spark table" in done.stderr else [("Spark table", ROWS, "0")]),
    ]  # fmt: skip
    mended = re.search(r"(\d+) damages mended", found["n2's store"][2])
    assert mended is not None
    assert int(mended[1]) > 0
    share = re.search(r"are ([\d.]+)% of", found["mirror"][2])
    assert share is not None
    assert float(share[1]) < 50
    assert not list(tmp_path.glob("dcpd-*")), "nothing is left"
