"""Who follows the cluster with `--all`, each in processes of its own, and how each ends up.

Mirror      reads from copies (cluster_mirror.py)
Group       three members that share the partitions and one file (cluster_group.py)
Backups     `dcpctl backup run` every ten seconds; at the end `restore` into an empty node
Table       a Spark query into a table (cluster_table.py), where PySpark and Java are there

While the nodes die, so do the members of the group and the mirror, one every few seconds. Another
one takes its place at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from cluster_cast import Nodes, say, until
from cluster_group import GroupFile
from cluster_mirror import mirror_at
from processes import ProcessFailedError, environment, tail

from dcpd import KvClient, Mirror
from dcpd.testing import DcpServer

MEMBERS = 3
KILL_S = 5.0
"""A member of the group or the mirror dies this often."""
BACKUP_S = 10.0
TABLE_S = 180.0
"""How long the query may take for what is left at the end."""
OWN_PREFIX = b"_dcpd:"
"""Of the documents that the cluster keeps for itself, such as the group's members."""


class Follower(NamedTuple):
    """What one of the audience has at the end."""

    name: str
    documents: Mapping[bytes, bytes]
    story: str


def documents_of_users(documents: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return documents without the cluster's own."""
    return {key: value for key, value in documents.items() if not key.startswith(OWN_PREFIX)}


class Program:
    """One of our programs beside this file, with a log. It may be killed and started again."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.log_path = folder / f"{name}.log"
        self._name = name
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, as the head of its own process group, so that `kill` ends its children too."""
        program = Path(__file__).with_name(f"{self._name.split('-')[0]}.py")
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(program), *self._arguments],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment(),
                start_new_session=True,
            )  # fmt: skip

    def check(self) -> None:
        """Raise ProcessFailedError if it ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise ProcessFailedError(f"{self._name} has ended: {tail(self.log_path)}")

    def kill(self) -> None:
        """End it with SIGKILL, and its children."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def finish(self, timeout_s: float) -> None:
        """End its standard input, and return when it has ended. Raises ProcessFailedError."""
        process = self._process
        assert process is not None
        try:
            process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailedError(f"{self._name} has not ended: {tail(self.log_path)}") from None
        if process.returncode:
            raise ProcessFailedError(f"{self._name} failed: {tail(self.log_path)}")
        self.kill()


class Audience:
    """See the module."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        address = nodes.address
        self.deaths = self.backups = 0
        self._nodes = nodes
        self._folder = folder
        self._archive = folder / "archive"
        self._restored = DcpServer(folder / "restored")
        self._backup: asyncio.subprocess.Process | None = None
        self._mirror_path, self._group_path = folder / "mirror.lmdb", folder / "group.sqlite"
        self._mirror = Program(folder, "cluster_mirror", address, str(self._mirror_path))
        self._members = [
            Program(folder, f"cluster_group-{number}", address, str(self._group_path))
            for number in range(1, MEMBERS + 1)
        ]
        table = folder / "spark"
        table.mkdir()
        self._table = Program(table, "cluster_table", address, str(table))
        self._why_no_table = why_no_table()
        self._programs = [*self._members, self._mirror]

    def start(self) -> None:
        """Start all programs."""
        GroupFile(self._group_path).close()  # its tables: members that start together would collide
        for program in self._programs:
            program.start()
        if self._why_no_table:
            say(f"no Spark table: {self._why_no_table}")
        else:
            self._programs.append(self._table)
            self._table.start()

    async def play(self) -> None:
        """Let them die and come back, and back up, until this is cancelled."""
        await asyncio.gather(self._die(), self._back_up())

    def check(self) -> None:
        """Raise ProcessFailedError if one ended by itself."""
        for program in self._programs:
            program.check()

    def close(self) -> None:
        """End all."""
        for program in self._programs:
            program.kill()
        if self._backup is not None and self._backup.returncode is None:
            self._backup.kill()
        if self._restored.runs:
            self._restored.kill()

    async def followers(self, kv: KvClient) -> list[Follower]:
        """Let all catch up with the cluster, which does not change any more, and end them."""
        high = await kv.get_all_vb_seqnos()
        found = await asyncio.gather(
            self._finished_mirror(), asyncio.to_thread(self._finished_group, high),
            self._restored_copy(), self._finished_table(),
        )  # fmt: skip
        return [follower for follower in found if follower is not None]

    async def _die(self) -> None:
        while True:
            for program in (*self._members, self._mirror):
                await asyncio.sleep(KILL_S)
                program.check()
                await asyncio.to_thread(program.kill)
                self.deaths += 1
                program.start()

    async def _back_up(self) -> None:
        while True:
            next_s = time.monotonic() + BACKUP_S
            await self._dcpctl(self._nodes.address, "run")
            self.backups += 1
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _dcpctl(self, address: str, verb: str) -> None:
        """Run `dcpctl backup`. Raises ProcessFailedError."""
        log_path = self._folder / "backup.log"
        command = ("--server", address, "backup", verb, "--archive", str(self._archive))
        with log_path.open("a") as log:
            self._backup = await asyncio.create_subprocess_exec(
                str(Path(sys.executable).with_name("dcpctl")), *command,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(),
            )  # fmt: skip
        if await self._backup.wait():
            raise ProcessFailedError(f"dcpctl backup {verb} failed: {tail(log_path)}")

    async def _finished_mirror(self) -> Follower:
        await asyncio.to_thread(self._mirror.kill)
        async with mirror_at(self._nodes.address, self._mirror_path) as mirror:
            return Follower("mirror", dict(mirror.items()), "read from copies")

    def _finished_group(self, high: Mapping[int, int]) -> Follower:
        """Return once the group has everything up to these seqnos."""
        file = GroupFile(self._group_path)

        def has_all() -> bool:
            for member in self._members:
                member.check()
            done = file.positions()
            return all(vb in done and done[vb].seqno >= high[vb] for vb in high if high[vb])

        try:
            until(has_all, "the group has everything")
            for member in self._members:
                member.kill()
            story = f"{self.deaths:,} deaths of its members and the mirror; epoch {file.epoch()}"
            return Follower("group", file.documents(), story)
        finally:
            file.close()

    async def _restored_copy(self) -> Follower:
        if self._backup is not None:  # it waits up to 10 s for a cut when nodes have died
            await self._backup.wait()
        await self._dcpctl(self._nodes.address, "run")
        await asyncio.to_thread(self._restored.start)
        await self._dcpctl(self._restored.address, "restore")
        async with Mirror(self._restored.address) as mirror:
            story = f"{self.backups + 1:,} backups; restored into an empty node"
            return Follower("restored copy", dict(mirror.items()), story)

    async def _finished_table(self) -> Follower | None:
        if self._why_no_table:
            return None
        await asyncio.to_thread(self._table.finish, TABLE_S)
        with sqlite3.connect(self._table.log_path.with_name("table.sqlite")) as db:
            held = dict(db.execute("SELECT key, value FROM document"))
        return Follower("Spark table", held, "a streaming query, and the rest from its checkpoint")


def why_no_table() -> str:
    """Return why there is no Spark query; "" if there can be one."""
    if find_spec("pyspark") is None:
        return "PySpark is missing: .venv/bin/pip install '.[spark]'"
    from dcpd.spark import JavaMissingError, check_java

    try:
        check_java()
    except JavaMissingError as error:
        return str(error)
    return ""
