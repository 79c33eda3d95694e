"""The source and its sink on executors that are processes of their own: everything is pickled."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from clients.kv.client import KvClient
from conftest import has_java, worker_environment


@pytest.mark.timeout(600)
def test_a_query_on_two_executors(dcpd, tmp_path):
    problem = has_java()
    if problem:
        pytest.skip(problem)
    documents = {f"k{number}": b"%d" % number for number in range(41_000)}

    async def store() -> None:
        async with KvClient.connect(dcpd.address) as kv:
            await kv.set_many(documents)

    asyncio.run(store())
    worker_environment()
    script = Path(__file__).with_name("cluster_run.py")
    run = subprocess.run(
        [sys.executable, str(script), dcpd.address, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["executors"] == 2
    assert told["rows"] == {key: value.decode() for key, value in documents.items()}
