"""What the pages on Spark show: the tutorial's command with fewer flights, and the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial-spark.md").read_text()
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.timeout(600)
def test_the_tutorial(spark, tmp_path, monkeypatch, capsys):
    """The look into the table gets the session that there is, instead of one more JVM."""
    script = BLOCKS["sh"].split()[1]
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--rows", "3000"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout
    told = re.findall(r"^  .*|^3,000 flights.*", done.stdout, re.MULTILINE)
    assert [re.sub(r"\d[\d,]* (changes|documents)", r"N \1", line).strip() for line in told] == [
        "writing begins",
        "history branch: N changes undone in 12 partitions",
        "the table after it: 0 differences",
        "query stopped, and started from its checkpoint",
        "everything is in the table",
        "3,000 flights, N documents in spark-ingest/table: all equal",
    ]
    picture = (tmp_path / "spark-ingest" / "lag.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(BLOCKS["python"], {})
    assert re.search(r"\| *set\|", capsys.readouterr().out)


@pytest.mark.timeout(300)
def test_the_code_on_the_first_page(spark, dcpd, tmp_path, capsys):
    page = (ROOT / "docs" / "spark.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    with dcpd.connect() as kv:
        kv.set(b"ada", b"lovelace")
    names: dict = {}
    for block in blocks:
        code = block.replace("127.0.0.1:11210", dcpd.address).replace("/data/", f"{tmp_path}/")
        at = re.search(r"^(times|read_table)", code, re.MULTILINE).start()
        exec(code[:at], names)
        try:
            names["query"].processAllAvailable()
            exec(code[at:], names)
        finally:
            names["query"].stop()
        assert re.search(r"\b1\b.*61 64 61", capsys.readouterr().out)
