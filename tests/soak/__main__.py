"""python -m tests.soak COMMAND: starts a long run. All but damage, flip, mend and subdoc can be
resumed."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from sim.run import Options
from support.etcd_members import IS_MISSING
from tests.soak import (
    check,
    churn,
    damage,
    flip,
    kill,
    mend,
    porcupine,
    power,
    proxy,
    simulate,
    subdoc,
)
from tests.soak.attack import run as attacking
from tests.soak.cluster import run as cluster
from tests.soak.cluster.faults import FAULTS
from tests.soak.fuzz import resident_bytes, run_round

GROWTH_BYTES_MAX = 64 << 20
SETTLED_ROUNDS = 200


def fuzz(frames_wanted: int, state_path: Path) -> int:
    """Run rounds until this many frames were sent, over all runs with this state file."""
    state = json.loads(state_path.read_text()) if state_path.exists() else {}
    frames, seed = state.get("frames", 0), state.get("seed", 0)
    began, began_frames, rounds, settled = time.monotonic(), frames, 0, 0
    while frames < frames_wanted:
        try:
            frames += run_round(seed).frames
        except BaseException:
            print(f"round {seed} failed; replay it with: scripts/soak fuzz --round {seed}")
            raise
        seed += 1
        rounds += 1
        if rounds == SETTLED_ROUNDS:
            settled = resident_bytes()
        if settled and resident_bytes() - settled > GROWTH_BYTES_MAX:
            print(f"memory grew from {settled} to {resident_bytes()} bytes by round {seed}")
            return 1
        if rounds % 50 == 0 or frames >= frames_wanted:
            rate = (frames - began_frames) / (time.monotonic() - began)
            state_path.write_text(json.dumps({"frames": frames, "seed": seed}))
            print(f"\r{frames:,} of {frames_wanted:,} frames, {rate:,.0f}/s", end="", flush=True)
    print(f"\n{frames:,} frames in {seed:,} rounds: no crash, no hang, no growth of memory")
    return 0


def add_attack(commands: Any) -> None:
    """Add the command `attack`."""
    attackers = commands.add_parser(
        "attack", help="kills, stalls, full disks, damage, floods and garbage, in random cases"
    )
    attackers.add_argument("--minutes", type=float, help="stop after this time")
    attackers.add_argument("--cases", type=int, help="stop at this many cases, over all runs")
    attackers.add_argument("--seed", type=int, help="of the run; a new seed begins a new run")
    attackers.add_argument("--kinds", type=lambda text: text.split(","), default=[],
                           help=f"only these of {','.join(attacking.KINDS)}")  # fmt: skip
    attackers.add_argument("--case", type=int, metavar="SEED", help="repeat one case")
    attackers.add_argument("--state", type=Path, default=Path(".soak-attack.json"))
    attackers.add_argument("--folder", type=Path, help="where cases work and failed ones are kept")


def add_cluster(commands: Any) -> None:
    """Add the command `cluster`."""
    clusters = commands.add_parser("cluster", help="three nodes and etcd as processes, and faults")
    clusters.add_argument("--minutes", type=float, help="stop after this time")
    clusters.add_argument("--rounds", type=int, help="stop at this seed, over all runs")
    clusters.add_argument("--round", type=int, metavar="SEED", help="repeat one seed")
    clusters.add_argument("--state", type=Path, default=Path(".soak-cluster.json"))
    clusters.add_argument("--keep", type=Path, help="keep folders and logs of all seeds here")
    clusters.add_argument("--porcupine", action="store_true", help="have histories judged by it, "
                          "too (scripts/go-consumers builds it)")  # fmt: skip
    clusters.add_argument("--only", type=lambda text: text.split(","), default=[],
                          metavar="FAULT,...", help=f"of {', '.join(FAULTS)}")  # fmt: skip
    clusters.set_defaults(run=soak_cluster)


def soak_cluster(arguments: argparse.Namespace) -> int:
    """Run what `add_cluster` has parsed; return the exit code."""
    if IS_MISSING:
        print("this needs the command etcd: sudo apt-get install etcd-server", file=sys.stderr)
        return 1
    if unknown := set(arguments.only) - FAULTS.keys():
        print(f"there is no fault {', '.join(sorted(unknown))}; --help has them", file=sys.stderr)
        return 2
    if arguments.round is not None:
        print(cluster.run_seed(arguments.round, arguments.keep, arguments.only).words())
        return 0
    return cluster.soak(
        arguments.state, minutes=arguments.minutes, rounds=arguments.rounds, keep=arguments.keep,
        only=arguments.only, judge=porcupine.judge_round if arguments.porcupine else None,
    )  # fmt: skip


def soak_mend(arguments: argparse.Namespace) -> int:
    """Damage stores in a folder of its own; return the exit code."""
    logging.getLogger().setLevel(logging.CRITICAL)
    with TemporaryDirectory() as folder:
        return mend.run(Path(folder), damages=arguments.damages, seed=arguments.seed)


def soak_damage(arguments: argparse.Namespace) -> int:
    """Damage the files of a node in a folder of its own; return the exit code."""
    if arguments.table:
        print(damage.tell(arguments.state))
        return 0
    with TemporaryDirectory() as folder:
        return damage.run(
            Path(folder), damages=arguments.damages, seed=arguments.seed, state=arguments.state
        )


def attack(arguments: argparse.Namespace) -> int:
    """Run what `add_attack` has parsed; return the exit code."""
    if arguments.case is not None:
        return attacking.attack_once(arguments.case, arguments.folder)
    return attacking.attack(
        arguments.state, seed=arguments.seed, kinds=arguments.kinds,
        minutes=arguments.minutes, cases=arguments.cases, folder=arguments.folder,
    )  # fmt: skip


def _add_models(commands: Any) -> None:
    """Add the commands that hold the code against a model."""
    checking = commands.add_parser("check", help="all states of the rules of replication")
    checking.add_argument("--minutes", type=float, help="stop after this time")
    checking.add_argument("--states", type=int, default=check.STATES_MAX, help="of one bound")
    checking.add_argument("--folder", type=Path, default=Path(".soak-check"))
    simulating = commands.add_parser("sim", help="simulated nodes, clients and faults, from seeds")
    simulating.add_argument("--seeds", type=int, default=100_000)
    simulating.add_argument("--state", type=Path, default=Path(".soak-sim.json"))
    judging = commands.add_parser("porcupine", help="histories of seeds, judged by it, too")
    judging.add_argument("--seeds", type=int, default=1_000)
    judging.add_argument("--state", type=Path, default=Path(".soak-porcupine.json"))
    judging.set_defaults(run=lambda given: porcupine.soak(given.seeds, given.state))
    subdocs = commands.add_parser("subdoc", help="sub-document operations against a model")
    subdocs.add_argument("--cases", type=int, default=100_000)
    subdocs.add_argument("--seed", type=int, default=1, help="number of the first case")
    subdocs.set_defaults(run=lambda arguments: subdoc.soak(arguments.cases, arguments.seed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fuzzing = commands.add_parser("fuzz", help="garbage at whole sessions")
    fuzzing.add_argument("--frames", type=int, default=10_000_000)
    fuzzing.add_argument("--round", type=int, help="replay one round")
    fuzzing.add_argument("--state", type=Path, default=Path(".soak-fuzz.json"))
    killing = commands.add_parser("kill", help="SIGKILL at a server under load")
    killing.add_argument("--kills", type=int, default=10_000)
    killing.add_argument("--folder", type=Path, default=Path(".soak-kill"))
    killing.add_argument("--lanes", type=int, choices=range(1, kill.LANES_MAX + 1), default=2,
                         metavar="N", help="lives side by side, each a process (2)")  # fmt: skip
    flipping = commands.add_parser("flip", help="flipped bits and bad pages in the store's file")
    flipping.add_argument("--flips", type=int, default=10_000)
    flipping.add_argument("--seed", type=int, default=1)
    churning = commands.add_parser("churn", help="the same keys written again and again")
    churning.add_argument("--writes", type=int, default=100_000_000)
    churning.add_argument("--keys", type=int, default=1_000_000)
    churning.add_argument("--value-bytes", type=int, default=128)
    churning.add_argument("--history-window", default="1h")
    churning.add_argument("--history-bytes", default="1GiB")
    churning.add_argument("--folder", type=Path, default=Path(".soak-churn"))
    powering = commands.add_parser("power", help="power cuts at any point of a node in memory")
    powering.add_argument("--rounds", type=int, default=100_000)
    powering.add_argument("--round", type=int, help="replay one round")
    powering.add_argument("--state", type=Path, default=Path(".soak-power.json"))
    proxying = commands.add_parser("proxy", help="consumers behind a bad network")
    proxying.add_argument("--events", type=int, default=100_000_000)
    proxying.add_argument("--writes", type=int, default=250_000, help="at once, in each round")
    proxying.add_argument("--round-events", type=int, default=2_000_000, help="in each round")
    proxying.add_argument("--round", type=int, help="replay one round")
    proxying.add_argument("--state", type=Path, default=Path(".soak-proxy.json"))
    mending = commands.add_parser("mend", help="damages of one copy of a cluster, under load")
    mending.add_argument("--damages", type=int, default=1_000)
    mending.add_argument("--seed", type=int, default=1)
    mending.set_defaults(run=soak_mend)
    damaging = commands.add_parser("damage", help="damages of all files of one of three nodes")
    damaging.add_argument("--damages", type=int, default=1_000)
    damaging.add_argument("--seed", type=int, default=1)
    damaging.add_argument("--state", type=Path, default=Path(".soak-damage.json"))
    damaging.add_argument("--table", action="store_true", help="print the results of all runs")
    damaging.set_defaults(run=soak_damage)
    _add_models(commands)
    add_attack(commands)
    add_cluster(commands)
    return parser


def end_as_by_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: end what was started, unmount disks, and tell where the run goes on."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # jobs in the background of a shell ignore Ctrl-C
        raise KeyboardInterrupt
    handler(number, frame)


def main() -> int:
    signal.signal(signal.SIGTERM, end_as_by_ctrl_c)
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.command == "attack":
        if unknown := set(arguments.kinds) - attacking.KINDS.keys():
            parser.error(f"there is no kind {', '.join(sorted(unknown))}")
        return attack(arguments)
    if hasattr(arguments, "run"):
        return arguments.run(arguments)
    if arguments.command == "proxy":
        if arguments.round is None:
            return proxy.soak(
                arguments.events, arguments.state, arguments.writes, arguments.round_events
            )
        with TemporaryDirectory() as folder:
            bounds = arguments.writes, arguments.round_events
            print(asyncio.run(proxy.run_round(Path(folder), arguments.round, *bounds)))
        return 0
    if arguments.command == "check":
        return check.soak(arguments.folder, arguments.minutes, arguments.states)
    if arguments.command == "sim":
        return simulate.soak(arguments.seeds, arguments.state, Options())
    if arguments.command == "churn":
        plan = churn.Plan(
            arguments.keys, arguments.value_bytes, arguments.history_window, arguments.history_bytes
        )
        return churn.run(arguments.folder, plan, arguments.writes)
    if arguments.command == "flip":
        with TemporaryDirectory() as folder:
            return flip.soak(Path(folder), arguments.seed, arguments.flips)
    if arguments.command == "power":
        if arguments.round is None:
            return power.soak(arguments.rounds, arguments.state)
        print(power.run_round(arguments.round))
        return 0
    if arguments.command == "kill":
        return kill.run(arguments.kills, arguments.folder, lanes=arguments.lanes)
    if arguments.round is not None:
        print(run_round(arguments.round))
        return 0
    return fuzz(arguments.frames, arguments.state)


if __name__ == "__main__":
    logging.getLogger("dcpd.consumer").setLevel(logging.ERROR)  # do not log every lost server
    sys.exit(main())
