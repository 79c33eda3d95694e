"""Virtual time, stopped processes and clocks."""

from __future__ import annotations

from sim.clock import Clock
from sim.world import MS, SECOND, Host, Trace, World


def test_events_run_in_order_of_their_time_and_of_their_making() -> None:
    world, seen = World(0), []
    world.after(20, seen.append, "late")
    world.after(10, seen.append, "first")
    world.after(10, seen.append, "second")
    world.after(30, seen.append, "beyond")
    world.run_until(20)
    assert seen == ["first", "second", "late"]
    assert (world.now_ns, world.events) == (20, 3)


def test_a_cancelled_event_does_not_run() -> None:
    world, seen = World(0), []
    world.after(10, seen.append, "no").cancel()
    world.run_until(20)
    assert seen == []


def test_events_of_a_dead_process_do_not_run() -> None:
    world, seen = World(0), []
    host = Host(world, "n1")
    host.after(10, seen.append, "old life")
    host.die()
    host.rise()
    host.after(10, seen.append, "new life")
    world.run_until(20)
    assert seen == ["new life"]


def test_a_stopped_process_gets_everything_late_and_in_order() -> None:
    world, seen = World(0), []
    host = Host(world, "n1")
    host.after(10, seen.append, "a")
    host.after(20, seen.append, "b")
    host.pause()
    world.run_until(30)
    assert seen == []
    host.resume()
    assert seen == ["a", "b"]
    assert world.now_ns == 30


def test_a_process_that_dies_while_stopped_gets_nothing() -> None:
    world, seen = World(0), []
    host = Host(world, "n1")
    host.after(10, seen.append, "a")
    host.pause()
    world.run_until(30)
    host.die()
    host.rise()
    host.resume()
    assert seen == []


def test_clocks_drift_and_timers_with_them() -> None:
    world, seen = World(0), []
    fast = Host(world, "fast", drift_ppm=100_000)
    clock = Clock(fast)
    begin_ns = clock.monotonic_ns()
    fast.after(SECOND, lambda: seen.append(clock.monotonic_ns() - begin_ns))
    world.run_until(SECOND)
    assert abs(seen[0] - SECOND) < MS
    assert clock.monotonic_ns() - begin_ns == SECOND * 11 // 10


def test_the_wall_clock_jumps_and_the_monotonic_one_does_not() -> None:
    world = World(0)
    clock = Clock(Host(world, "n1"))
    wall_ns, monotonic_ns = clock.wall_ns(), clock.monotonic_ns()
    clock.jump(-5 * SECOND)
    assert clock.wall_ns() == wall_ns - 5 * SECOND
    assert clock.monotonic_ns() == monotonic_ns


def test_the_hash_of_a_trace_tells_different_bytes_apart() -> None:
    digests = set()
    for data in (b"a", b"b", b"a"):
        trace = Trace()
        world = World(0, trace)
        world.after(1, len, data)
        world.run_until(1)
        digests.add(trace.digest)
    assert len(digests) == 2
