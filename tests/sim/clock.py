"""The clocks of a machine: they drift, and the wall clock jumps.

Cores never read a clock. The shell of a simulated node reads these and hands the time over.

Invariants
- the monotonic clock never goes back, and goes on while the process is stopped;
- the wall clock may jump either way; a restart does not mend it.
"""

from __future__ import annotations

from sim.world import Host

WALL_START_NS = 1_800_000_000_000_000_000
"""Unix time at which every simulation begins."""
PPM = 1_000_000


class Clock:
    """See the module. The drift is that of the host, whose timers go by the same clock."""

    def __init__(self, host: Host, wall_offset_ns: int = 0) -> None:
        self._host = host
        self._world = host.world
        self._boot_ns = 1_000_000_000 + host.world.below(1_000_000_000)
        """Monotonic clocks begin anywhere."""
        self._wall_offset_ns = wall_offset_ns

    def monotonic_ns(self) -> int:
        """Return the time since some moment in the past."""
        now_ns, drift_ppm = self._world.now_ns, self._host.drift_ppm
        return self._boot_ns + now_ns + (now_ns * drift_ppm // PPM if drift_ppm else 0)

    def wall_ns(self) -> int:
        """Return Unix time, as this machine believes it."""
        return WALL_START_NS + self.monotonic_ns() + self._wall_offset_ns

    def set_right(self) -> None:
        """Set the wall clock to what the others have that are right. It goes on drifting."""
        self._wall_offset_ns = self._world.now_ns - self.monotonic_ns()

    def jump(self, by_ns: int) -> None:
        """Set the wall clock forward, or back."""
        self._wall_offset_ns += by_ns
