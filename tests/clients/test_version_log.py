"""Partitions with more versions than plain DCP shows: every client of ours gets all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients import CheckpointFile, Consumer
from clients.backup.archives.archive import open_archive
from clients.cli.dcpctl import run
from clients.event import Mutation, Rollback, StreamOpened
from clients.kv import commands
from clients.position import version_log_group, versions_of
from support.server import DcpdProcess
from vbucket.model.ids import vbucket_of

KEY = b"often"
VB = vbucket_of(KEY)
FAILOVERS = 60
FAILOVERS_MAX = 200
"""After so many, none of the versions before is left."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    """One change, and then 60 failovers with a change each."""
    with DcpdProcess(tmp_path_factory.mktemp("versions") / "data") as process:
        with process.connect() as kv:
            for number in range(FAILOVERS + 1):
                if number:
                    process.failover(VB)
                kv.set(KEY, b"%d" % number)
        yield process


@pytest.fixture
def log(server: DcpdProcess) -> list[tuple[int, int]]:
    with server.connect() as kv:
        versions = kv.version_log(VB)
    assert [seqno for _, seqno in versions] == list(range(FAILOVERS, -1, -1))
    return versions


def test_plain_dcp_shows_25(server: DcpdProcess, log: list[tuple[int, int]]) -> None:
    with server.connect() as kv:
        assert kv.failover_log(VB) == log[:25]
        assert kv.version_log(VB + 1) == kv.failover_log(VB + 1)


async def test_a_consumer_that_was_away_for_60_failovers_goes_on(
    server: DcpdProcess, log: list[tuple[int, int]]
) -> None:
    """It begins at a seqno, where the version is one that plain DCP does not show."""
    async with Consumer(server.address, vbuckets=[VB], start={VB: 1}, until_now=True) as consumer:
        events = [event async for event in consumer]
    opened = next(event for event in events if isinstance(event, StreamOpened))
    assert (opened.start_seqno, list(opened.failover_log)) == (1, log)
    assert not [event for event in events if isinstance(event, Rollback)]
    assert [event.value for event in events if isinstance(event, Mutation)] == [b"%d" % FAILOVERS]


def test_commands_know_all_versions(
    server: DcpdProcess,
    log: list[tuple[int, int]],
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DCPCTL_SERVER", server.address)
    vb_id, oldest = str(VB), str(log[-1][0])
    assert run(["explain", "rollback", vb_id, "--uuid", oldest, "--seqno", "1", "-o", "json"]) == 0
    told = json.loads(capfdbinary.readouterr()[0])
    assert told["answer"] == server.explain_rollback(VB, int(oldest), 1)["answer"] == "OK"
    assert run(["failover-log", vb_id, "-o", "json"]) == 0
    rows = [json.loads(line) for line in capfdbinary.readouterr()[0].splitlines()]
    assert [(int(row["vb_uuid"]), row["seqno"]) for row in rows] == log


def test_an_archive_has_all_versions(
    server: DcpdProcess,
    log: list[tuple[int, int]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DCPCTL_SERVER", server.address)
    folder = tmp_path_factory.mktemp("archive") / "a"
    assert run(["backup", "run", "--archive", str(folder)]) == 0
    (leg,) = open_archive(str(folder)).runs()[-1].legs[VB]
    assert list(leg.versions) == log


def test_a_server_that_does_not_know_the_group_tells_no_more(
    server: DcpdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.connect() as kv:
        shown = kv.failover_log(VB)
        with monkeypatch.context() as patched:
            patched.setattr(commands, "version_log_group", lambda vb_id: b"no-group %d" % vb_id)
            assert kv.version_log(VB) == shown
        assert len(kv.version_log(VB)) == FAILOVERS + 1 > len(shown)
        (link,) = kv._exchange._links.values()
        frames = link.request_stat(version_log_group(VB))
    assert len(versions_of(frames, VB)) == FAILOVERS + 1
    assert versions_of(frames[:-2], VB) == (), "a row is missing"


async def test_a_consumer_that_was_away_for_too_many_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointFile(tmp_path / "checkpoint")
    with DcpdProcess(tmp_path / "data") as server:
        with server.connect() as kv:
            kv.set(KEY, b"v")
        for failovers, lost in ((FAILOVERS_MAX - 1, 0), (FAILOVERS_MAX, 1)):
            async with Consumer(
                server.address, vbuckets=[VB], until_now=True, store=store
            ) as consumer:
                assert [event async for event in consumer]
                await consumer.save()
            for _ in range(failovers):
                server.failover(VB)
            with caplog.at_level("WARNING"):
                async with Consumer(
                    server.address, vbuckets=[VB], until_now=True, store=store
                ) as consumer:
                    events = [event async for event in consumer]
            assert consumer.metrics.versions_lost == lost
            assert sum(isinstance(event, Rollback) for event in events) == lost
            said = "the server keeps its newest 200 versions, and none of this consumer's"
            assert (said in caplog.text) == bool(lost)
