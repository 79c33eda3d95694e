"""Plays scenarios for a consumer's command, some at a time, and reports what came of each."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from clients.conformance.check import FAIL, NOT_APPLICABLE, PASS, Check, Result, Run
from clients.conformance.consumers import clusters, connections, contents, rollbacks
from clients.conformance.consumers.scenario import SCENARIOS, Scenario
from clients.conformance.consumers.stage import JudgedError, NotPlayedError, Stage
from clients.conformance.wire import WireError
from clients.errors import DcpdError
from clients.testing.cluster import DcpCluster

PAGE: Final = "docs/conformance-scenarios.md"
MODULES: Final = (rollbacks, connections, contents, clusters)
"""The modules that fill the table of scenarios."""
TIMEOUT_S: Final = 15.0


class UnknownScenarioError(DcpdError):
    """There is no scenario with this name."""


def chosen(names: Iterable[str]) -> list[Scenario]:
    """Return scenarios by name or group; "all" for all. Raises UnknownScenarioError."""
    found: dict[str, Scenario] = {}
    for name in names:
        some = {
            each.name: each for each in SCENARIOS.values() if name in {"all", each.name, each.group}
        }
        if not some:
            raise UnknownScenarioError(
                f"there is no scenario or group {name!r}",
                hint="`dcpctl conformance consumer --list` has them all.",
            )
        found |= some
    return list(found.values())


class _SharedCluster:
    """The cluster of all scenarios that need one; it starts with the first."""

    def __init__(self) -> None:
        self._cluster: DcpCluster | None = None
        self.keys: dict[str, None] = {}
        """What was written there so far."""

    def get(self) -> DcpCluster:
        if self._cluster is None:
            self._cluster = DcpCluster().__enter__()
        self._cluster.wait_until_in_sync()
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()


def play_all(
    scenarios: Sequence[Scenario],
    command: Sequence[str],
    *,
    at_once: int = 2,
    timeout_s: float = TIMEOUT_S,
    tell: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Play scenarios; return the outcomes in their order. `tell` is called as each is over.

    Those on a cluster share one, and are played one after the other.
    """
    shared = _SharedCluster()
    lock = threading.Lock()

    def play(some: list[Scenario]) -> list[Result]:
        outcomes = []
        for number, each in enumerate(some):
            outcome = play_one(
                each, command, timeout_s=timeout_s, shared=shared if each.needs_cluster else None,
                number=number,
            )  # fmt: skip
            outcomes.append(outcome)
            with lock:
                tell(outcome)
        return outcomes

    on_cluster = [each for each in scenarios if each.needs_cluster]
    groups = [on_cluster, *([each] for each in scenarios if not each.needs_cluster)]
    try:
        with ThreadPoolExecutor(at_once) as pool:
            outcomes = [each for some in pool.map(play, groups) for each in some]
    finally:
        shared.close()
    order = {each.name: at for at, each in enumerate(scenarios)}
    return sorted(outcomes, key=lambda outcome: order[outcome.check.id.partition(".")[2]])


def play_one(
    scenario: Scenario,
    command: Sequence[str],
    *,
    timeout_s: float = TIMEOUT_S,
    shared: _SharedCluster | None = None,
    number: int = 0,
) -> Result:
    """Play one scenario in a temporary folder; see `play_all`.

    `number` keeps scenarios on one cluster apart: each has a partition of its own.
    """
    began_s = time.monotonic()
    outcome, reason = PASS, ""
    lines: Sequence[str] = ()
    with tempfile.TemporaryDirectory(prefix="dcpd-scenario-") as folder:
        try:
            stage = Stage(
                command, Path(folder), timeout_s=timeout_s + scenario.timeout_s,
                cluster=shared.get() if shared else None, keys=shared.keys if shared else None,
                partitions=scenario.partitions,
            )  # fmt: skip
            stage.vb_id += number
            with stage:
                scenario.play(stage)
        except JudgedError as error:
            outcome, (reason, *lines) = FAIL, error.lines
        except NotPlayedError as error:
            outcome, reason = NOT_APPLICABLE, str(error)
        except (DcpdError, WireError, OSError) as error:
            outcome, reason = FAIL, f"the kit could not play it: {error}"
    name, page = f"{scenario.group}.{scenario.name}", " ".join(scenario.page.split())
    check = Check(name, page, PAGE, _is_no_server_check, scenario.title)
    return Result(check, outcome, reason, time.monotonic() - began_s, tuple(lines))


def _is_no_server_check(_: Run) -> None:
    raise AssertionError("a scenario is played by the suite")
