"""The clusters that dcpd's is compared with start, and answer when a majority or both copies do."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import workload
from benchmarks.answers import WaitingRespCounter
from benchmarks.cluster_peers import PEER_CLUSTERS
from benchmarks.generator import Load, run
from clients.cli.node.answers import AnswerError


@pytest.mark.parametrize("name", list(PEER_CLUSTERS))
def test_three_servers_take_a_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PEER_CLUSTERS[name](tmp_path / name) as peer:
        load = Load(peer.protocol, peer.port, connections=2, in_flight=8, keys=99, load=True)
        result = run(load)
        assert (result.operations, result.errors, len(peer.pids)) == (99, 0, 3)
        for pid in peer.pids[1:]:
            os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr("benchmarks.generator.STALL_SECONDS", 1.0)
        with pytest.raises((AnswerError, OSError)):
            run(load)
    assert not (tmp_path / name).exists()


@given(st.lists(st.integers(0, 500), max_size=8))
def test_a_batch_of_redis_ends_with_its_wait(cuts):
    counter = WaitingRespCounter()
    assert counter.outgoing(b"x") == b"x" + workload.resp_command(b"WAIT", b"2", b"0")
    answer = b"+OK\r\n$15\r\n1526919030474-0\r\n" * 2 + b":2\r\n"
    for _ in range(2):
        counter.begin(2)
        places = sorted({0, len(answer), *(cut % (len(answer) + 1) for cut in cuts)})
        fed = [counter.feed(answer[low:high]) for low, high in pairwise(places)]
        assert fed == [False] * (len(fed) - 1) + [True]
    assert counter.errors == 0
