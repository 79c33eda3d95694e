"""A machine: a host with clocks and disks, on which a node's process lives and dies.

    RUNNING ── kill, cut_power, the process ends itself ──> DOWN ── start ──> RUNNING
    RUNNING <── resume ── pause ──> STOPPED

Invariants
- disks survive the process. A power cut keeps any part of what was not synced; a kill keeps all
  that was written;
- a new process gets nothing of the old one but the disks and the clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from failover.coordinator.map_life import NEVER_SENT
from failover.coordinator.seen_records import SeenContent
from sim.clock import Clock
from sim.network import Network
from sim.node import SimNode, StartFailedError, StartRefusedError
from sim.world import MS, EventEndedError, Host, World
from support.forgetful_disk import ForgetfulDisk, ForgetfulEnv, Power
from vbucket.log.device_files import FileLogDevice
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import TABLES

RESTART_NS = 100 * MS
"""Pause before a process that ended by itself is started again."""


class EndedInsideError(EventEndedError):
    """A process has ended inside an event. Nothing of the product may catch it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.name)
        self._machine = machine

    def happen(self) -> None:
        """See EventEndedError."""
        self._machine.end_now()


Boot = Callable[["Machine"], SimNode]
"""Starts a node's process on a machine. Raises StartRefusedError."""


class Machine:
    """See the module. `boot` makes the process; everything that it uses is here."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        boot: Boot,
        *,
        drift_ppm: int = 0,
        env_type: type[ForgetfulEnv] = ForgetfulEnv,
    ) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.host = Host(world, name, drift_ppm)
        self.host.is_up = False
        self.slow_sync_ns = 0
        """How much longer each sync of the log takes."""
        self.clock = Clock(self.host)
        self._boot = boot
        self._env_type = env_type
        self.node: SimNode | None = None
        self.refusals: list[str] = []
        """Why starts were refused: the disks hold what a node cannot continue with."""
        self._folders = 0
        self.end_inside(0, None)
        network.add(self.host)
        self._new_disks()

    @property
    def folder_id(self) -> str:
        """The id that a new folder gets."""
        return f"{self.name}-{self._folders}"

    def _new_disks(self) -> None:
        self._folders += 1
        self.disk = ForgetfulDisk(self._power())
        self.env = self._env_type(self._power(), TABLES)
        self.seen: SeenContent | None = None
        """The folder's file seen.json; it is replaced as a whole, and synced."""
        self.sent_map = NEVER_SENT
        """The same of map.json."""
        self.closed = 0
        """The same of closed.json: no time above it was closed."""

    def _power(self) -> Power:
        power = Power()
        power.on_point = self._point
        return power

    def open_device(self, device_type: type[FileLogDevice] = FileLogDevice) -> FileLogDevice:
        """Open the log's device, as a new process does."""
        return device_type(Path(self.name), self.world.draw, self.disk)

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the node's process. If it refuses, `refusals` has why."""
        assert self.node is None
        had_power = self.host.has_power
        self.host.rise()
        if not had_power:
            self.network.machine_is_back(self.host)
        try:
            self.node = self._boot(self)
            self.world.tell("start", self.name, "its process starts")
        except EndedInsideError:
            self.end_now()
        except StartRefusedError as error:
            is_of_store = isinstance(error.__cause__, StoreDamagedError)
            if is_of_store and self.env.put_right(f"a start was refused: {error}"):
                self.exited()
                return
            self.refusals.append(f"{self.name} refuses to start: {error}")
            self.world.note(self.refusals[-1])
            self.world.tell("start refused", self.name, f"refuses to start: {error}")
            self._end(has_power=True)
        except StartFailedError as error:
            self.world.note(f"{self.name} could not start: {error}")
            self.exited()

    def exited(self) -> None:
        """The process has ended by itself. A supervisor starts it again."""
        self._end(has_power=True)
        self.world.after(RESTART_NS, self._restart)

    def _restart(self) -> None:
        if self.node is None and self.host.has_power:
            self.start()

    def kill(self) -> None:
        """End the process; the disks keep all that was written."""
        self._end(has_power=True)

    def cut_power(self, share: float) -> None:
        """Cut the power; about `share` of what was not synced survives."""
        self._end(has_power=False)
        draw = self.world.draw
        self.env = self.env.after(self._power(), draw, share)
        is_full, self.disk = self.disk.is_full, self.disk.after(self._power(), draw, share)
        self.disk.is_full = is_full

    def lose_folder(self) -> None:
        """The folder is gone; the next start begins with empty disks."""
        assert self.node is None, "the process is down while its folder is replaced"
        self._new_disks()
        self.world.tell("lost folder", self.name, "its folder is gone: it begins with empty disks")

    def pause(self) -> None:
        """Stop the process for a while."""
        self.host.pause()

    def resume(self) -> None:
        """Let a stopped process go on."""
        self.host.resume()

    def end_inside(self, points: int, share: float | None) -> None:
        """End the process inside an event: at the so manieth point (a write, a sync, a rename, a
        commit of the store) from now. `share`: the power goes, see `cut_power`; None: it is killed.
        0 points: not at all.
        """
        self.points_left, self._share = points, share

    def _point(self, _name: str) -> None:
        if self.points_left:
            self.points_left -= 1
            if not self.points_left:
                raise EndedInsideError(self)

    def end_now(self) -> None:
        """The process has ended inside an event, before the write at hand took effect."""
        self.world.note(f"{self.name} ended inside an event")
        if self._share is None:
            self.kill()
        else:
            self.cut_power(self._share)

    def _end(self, *, has_power: bool) -> None:
        if self.node is not None:
            self.node.ended()
            text = "its process ends" if has_power else "loses power"
            self.world.tell("end", self.name, text)
        self.node = None
        self.host.die()
        self.host.has_power = has_power
        self.network.process_died(self.host, has_power=has_power)
