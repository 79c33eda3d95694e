"""dcpctl consumer keep, list, groups and forget on a server: kill -9, purges, and what is told."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from clients import Deletion, GroupMember, Rollback, ServerCheckpoint, SyncConsumer
from clients.testing import DcpServer, ServerRefusedError

KEYS = 200


def dcpctl(server: DcpServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clients.cli", "--server", server.address, *arguments],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[DcpServer]:
    with DcpServer(None, "--compact-interval", "0") as server:
        yield server


def write(server: DcpServer) -> None:
    with server.connect() as kv:
        for number in range(KEYS):
            kv.set(f"k{number}", b"1")


def delete_and_purge(server: DcpServer, value: bytes = b"1") -> None:
    """Delete all but the last changes of partitions, which are never purged."""
    with server.connect() as kv:
        for number in range(KEYS):
            kv.delete(f"k{number}")
        for number in range(3 * KEYS):
            kv.set(f"later{number}", value)
    server.compact(history="0s", purge_age="0s")


def read(server: DcpServer, name: str) -> tuple[list[Rollback], int]:
    """Read what is new for a consumer, and save; return its rollbacks and number of deletions."""
    with SyncConsumer(
        server.address, store=ServerCheckpoint(server.address, name), until_now=True,
        on_rollback="restart",
    ) as consumer:  # fmt: skip
        found = list(consumer.changes())
        consumer.save()
    rollbacks = [each for each in found if isinstance(each, Rollback)]
    return rollbacks, sum(isinstance(each, Deletion) for each in found)


def listed(server: DcpServer) -> dict[str, dict[str, object]]:
    lines = dcpctl(server, "consumer", "list", "-o", "json").stdout.splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


def test_a_kept_consumer_finds_no_purge_behind_it_after_kill_9(server: DcpServer) -> None:
    write(server)
    read(server, "billing")
    kept = dcpctl(server, "consumer", "keep", "billing", "--for", "7d", "--bytes", "5GiB")
    assert (kept.returncode, kept.stderr) == (0, "")
    server.restart()
    delete_and_purge(server)
    server.restart()
    server.compact(history="0s", purge_age="0s")
    row = listed(server)["billing"]
    assert row["states"] == {"kept": 1024}
    assert (row["kept_for_s"], row["kept_bytes"]) == (7 * 86_400, 5 << 30)
    assert read(server, "billing") == ([], KEYS)


def test_one_beyond_its_limits_is_told_before_and_after(server: DcpServer) -> None:
    write(server)
    read(server, "small")
    dcpctl(server, "consumer", "forget", "billing", "--yes")
    assert "billing" not in listed(server)
    dcpctl(server, "consumer", "keep", "small", "--for", "7d", "--bytes", "1MiB")
    delete_and_purge(server, b"x" * 2_000)
    server.compact(history="0s", purge_age="0s")
    lost = listed(server)["small"]["states"]["lost"]
    assert lost > 50
    gauge = 'dcpd_consumer_keep_vbuckets{consumer="small",state="lost"}'
    assert server.metrics()[gauge] == lost
    assert "deletions that a consumer has not seen are purged" in server.log_path.read_text()
    status = dcpctl(server, "status")
    assert "consumer small: deletions that it has not seen are purged" in status.stdout
    rollbacks, _ = read(server, "small")
    assert len(rollbacks) == lost
    assert all("are purged, which this consumer has not seen" in each.reason for each in rollbacks)
    assert "What was kept for consumer 'small' (for 604800 s, 1048576 bytes) has passed" in (
        server.log_path.read_text()
    )
    assert set(listed(server)["small"]["states"]) <= {"kept", "ending"}


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (("59s", "5GiB"), "must be from 1m to 365d"),
        (("366d", "5GiB"), "must be from 1m to 365d"),
        (("7d", "1KiB"), "must be from 1MiB to 1024TiB"),
        (("7d", "9999TiB"), "must be from 1MiB to 1024TiB"),
        (("soon", "5GiB"), "must be a duration"),
        (("7d", "much"), "must be a size"),
    ],
)
def test_limits_of_retention_are_refused_in_words(
    server: DcpServer, limits: tuple[str, str], why: str
) -> None:
    before = listed(server)
    refused = dcpctl(server, "consumer", "keep", "x", "--for", limits[0], "--bytes", limits[1])
    assert refused.returncode == 2
    assert why in refused.stderr
    assert "nothing was changed" in refused.stderr
    assert listed(server) == before


def test_a_name_that_is_too_long_is_refused(server: DcpServer) -> None:
    body = {"name": "x" * 201, "for": "7d", "bytes": "5GiB"}
    with pytest.raises(ServerRefusedError, match="1 to 200 bytes"):
        server.ask("POST", "/api/v1/consumers/keep", body)


def test_groups_are_listed_with_their_members(server: DcpServer) -> None:
    async def of_two() -> tuple[list[str], subprocess.CompletedProcess[str], str]:
        async with (
            GroupMember(server.address, "sinks") as first,
            GroupMember(server.address, "sinks") as second,
        ):
            shown = await asyncio.to_thread(dcpctl, server, "consumer", "groups")
            listed = await asyncio.to_thread(dcpctl, server, "consumer", "groups", "-o", "json")
            return [first.member, second.member], shown, listed.stdout

    members, shown, listed = asyncio.run(of_two())
    row = json.loads(listed)
    assert (row["name"], row["epoch"]) == ("sinks", 2)
    assert row["members"] == dict.fromkeys(members, 512)
    assert all(member in shown.stdout for member in members)
    left = json.loads(dcpctl(server, "consumer", "groups", "-o", "json").stdout)
    assert (left["epoch"], left["members"]) == (4, {})
