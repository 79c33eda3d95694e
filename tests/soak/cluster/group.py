"""A living group of consumers beside the load: members die, stand still and leave, and come back.

The members are processes (`group_member`) that share the partitions and one file. Every few seconds
one of them, or two, are killed, frozen for longer than their lease, or told to leave. At the end
each change has had its effect once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from clients.kv.client import KvClient
from support.waiting import until
from tests.soak.cluster.beside import Beside
from tests.soak.cluster.contents import SHOWN, different, stored_of
from tests.soak.cluster.group_member import LEASE_S, GroupSink
from tests.soak.cluster.load import Load
from tests.soak.cluster.network import ROOT

MEMBERS: Final = 3
AWAY_S: Final = (0.0, 3.0)
"""How long a dead member is away."""
FROZEN_S: Final = (1.2 * LEASE_S, 2 * LEASE_S)
LEAVE_S: Final = 60.0
"""Longest time in which a member leaves. It ends what it does, and its cluster may not answer."""
FOLLOW_S: Final = 300.0
"""Longest time until the group has everything."""
WAYS: Final = {"killed": 4, "frozen": 2, "left": 1}
"""How a member goes, and how often."""


class GroupError(Exception):
    """A member has ended by itself, or the group does not follow."""


class Member:
    """A member's process. It may go and come back."""

    def __init__(self, folder: Path, number: int, address: Callable[[], str]) -> None:
        self._path = folder / "group.sqlite"
        self._log_path = folder / f"group-{number}.log"
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None
        self._is_frozen = False

    def start(self) -> None:
        """Begin to follow. Ctrl-C at the terminal is for who started us."""
        program = "tests.soak.cluster.group_member"
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, self._address(), str(self._path)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT, start_new_session=True,
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            )  # fmt: skip

    def check(self) -> None:
        """Raise GroupError if it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise self._ended()

    def freeze(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)
        self._is_frozen = True

    def thaw(self) -> None:
        """SIGCONT, if it is frozen."""
        if self._is_frozen:
            self._signal(signal.SIGCONT)
            self._is_frozen = False

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        process, self._process, self._is_frozen = self._process, None, False
        if process is not None:
            _kill(process)

    def leave(self) -> None:
        """End its input, and return when it has left the group. Raises GroupError."""
        process, self._process = self._process, None
        assert process is not None
        try:
            process.communicate(timeout=LEAVE_S)
        except subprocess.TimeoutExpired:  # its cluster does not answer
            _kill(process)
        else:
            if process.returncode:
                raise self._ended()

    def _ended(self) -> GroupError:
        log = self._log_path.read_text(errors="replace")
        return GroupError(f"a member of the group has ended: {log[-3000:]}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError):
        process.communicate()


class LivingGroup(Beside):
    """See the module. `address`: where the nodes are now."""

    def __init__(
        self,
        folder: Path,
        address: Callable[[], str],
        draw: random.Random,
        every_s: tuple[float, float],
    ) -> None:
        """`every_s`: between these is the time between two deaths."""
        super().__init__()
        self.deaths: Counter[str] = Counter()
        """How members went -> how often."""
        self.effects = self.epoch = 0
        """At the end: changes that had their effect, and the newest epoch."""
        self._path = folder / "group.sqlite"
        self._draw = draw
        self._every_s = every_s
        self._members = [Member(folder, number, address) for number in range(MEMBERS)]

    def begin(self) -> None:
        """Start all members."""
        GroupSink(self._path).close()  # its tables: members that start together would collide
        for member in self._members:
            member.start()
        super().begin()

    def check(self) -> None:
        """Raise GroupError if a member has ended by itself."""
        for member in self._members:
            member.check()
        super().check()

    async def abandon(self) -> None:
        """Kill all members."""
        await super().abandon()
        for member in self._members:
            member.kill()

    async def wrong(self, load: Load, kv: KvClient) -> list[str]:
        """Compare effects with documents. Raises GroupError if the group does not follow."""
        high, stored = await kv.get_all_vb_seqnos(), await stored_of(kv, load)
        return await asyncio.to_thread(self._against, high, stored)

    async def _go_on(self) -> None:
        draw = self._draw
        while True:
            await self._rest(draw.uniform(*self._every_s))
            if self._is_over.is_set():
                return
            way = draw.choices(list(WAYS), list(WAYS.values()))[0]
            chosen = draw.sample(self._members, draw.choice((1, 1, 2)))
            await asyncio.gather(*(self._go(member, way) for member in chosen))

    async def _go(self, member: Member, way: str) -> None:
        """Let a member go in this way, and come back."""
        member.check()
        self.deaths[way] += 1
        if way == "frozen":
            member.freeze()
            await self._rest(self._draw.uniform(*FROZEN_S))
            member.thaw()
            return
        await asyncio.to_thread(member.kill if way == "killed" else member.leave)
        await self._rest(self._draw.uniform(*AWAY_S))
        member.start()

    def _against(self, high: Mapping[int, int], stored: Mapping[bytes, bytes]) -> list[str]:
        with closing(GroupSink(self._path)) as sink:
            self._until_followed(sink, high)
            for member in self._members:
                member.kill()
            self.effects, self.epoch = sink.effects(), sink.epoch()
            found = different("the group", sink.documents(), stored)
            if lacking := sink.unaccounted():
                some = dict([*lacking.items()][:SHOWN])
                found.append(
                    f"changes of {len(lacking)} partitions have no effect, or several (partition:"
                    f" changes without one): {some}"
                )
            return found

    def _until_followed(self, sink: GroupSink, high: Mapping[int, int]) -> None:
        behind: dict[int, tuple[int, int]] = {}

        def has_all() -> bool:
            for member in self._members:
                member.check()
            done = {vb_id: place.seqno for vb_id, place in sink.positions().items()}
            behind.clear()
            behind.update({vb_id: (done.get(vb_id, 0), seqno) for vb_id, seqno in high.items()
                           if done.get(vb_id, 0) < seqno})  # fmt: skip
            return not behind

        try:
            until(has_all, FOLLOW_S)
        except AssertionError:
            raise GroupError(
                f"the group is behind in {len(behind)} partitions (where it is, and should be):"
                f" {dict([*behind.items()][:SHOWN])}"
            ) from None
