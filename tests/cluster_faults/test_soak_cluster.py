"""`scripts/soak cluster` continues where it was; its checks notice what is wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from support.etcd_members import EtcdMembers
from support.forgetful_disk import small_disk
from support.waiting import until
from tests.soak.cluster import faults, run
from tests.soak.cluster.contents import _against_answers, different
from tests.soak.cluster.faults import ALONE, FAULTS, Scene
from tests.soak.cluster.history import Kind, Operation
from tests.soak.cluster.load import Load
from tests.soak.cluster.network import Network
from tests.soak.cluster.nodes import FaultyCluster, is_alive
from tests.soak.cluster.run import RoundReport, choose, soak

ROOT = Path(__file__).parents[2]


def test_the_command_goes_on_with_the_next_seed(tmp_path, monkeypatch, capsys):
    seeds = []

    def run_seed(seed: int, _keep: Path | None, only: tuple[str, ...]) -> RoundReport:
        seeds.append(seed)
        assert only == ("kill node",)
        if len(seeds) == 3:
            raise KeyboardInterrupt
        return RoundReport(100, 2, Counter({"kill node": 1}), 1.0, 1, 50, 4, 40, 2, 1, {b"k": []})

    def judge(histories: dict[bytes, list[Operation]]) -> Counter[str]:
        assert histories == {b"k": []}
        return Counter({"Ok": 1})

    monkeypatch.setattr(run, "run_seed", run_seed)
    state = tmp_path / "state.json"
    assert soak(state, rounds=5, only=("kill node",), judge=judge) == 130
    assert "stopped in seed 2" in capsys.readouterr().out
    assert soak(state, rounds=4, only=("kill node",), judge=judge) == 0
    assert seeds == [0, 1, 2, 2, 3], "the seed that was interrupted comes again"
    out = capsys.readouterr().out
    assert "4 seeds, 400 answered, 8 ambiguous, 4 SIGKILLs, 200 events" in out
    assert "Porcupine: 4 histories judged the same by both" in out
    assert "40 effects through 4 deaths in the group, 2 backups (1 cuts)" in out
    assert "16 deaths in the group, 160 effects, 8 backups" in out
    kept = json.loads(state.read_text())
    assert kept["faults"] == {"kill node": 4}
    assert (kept["deaths"], kept["effects"], kept["backups"], kept["cuts"]) == (16, 160, 8, 4)


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has just ended
            continue
        found += [words] if str(folder) in words else []
    return found


@pytest.mark.crash
def test_sigterm_ends_what_was_started_and_unmounts_the_disk(tmp_path: Path) -> None:
    state, keep = tmp_path / "state.json", tmp_path / "kept"
    with small_disk("1m") as disk:  # skips the test where no disk can be mounted
        command = [sys.executable, "-m", "tests.soak", "cluster", "--rounds", "1"]
        soaking = subprocess.Popen(
            [*command, "--state", str(state), "--keep", str(keep)],
            env=os.environ | {"TMPDIR": str(disk), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            until(lambda: any(path.is_mount() for path in disk.glob("dcpd-disk-*")))
            until(lambda: processes_in(keep) and (keep / "seed-0" / "a.log").exists())
            soaking.send_signal(signal.SIGTERM)
            out, _ = soaking.communicate(timeout=120)
            assert soaking.returncode == 130
            assert "stopped in seed 0" in out
            assert list(disk.iterdir()) == []
            assert processes_in(keep) == []
        finally:
            soaking.kill()
            soaking.wait()
            for path in disk.glob("dcpd-disk-*"):
                subprocess.run(["umount", "--lazy", str(path)], check=False)


@pytest.mark.parametrize("words", [(), ("--round", "7")])
def test_without_etcd_it_says_what_is_missing(tmp_path: Path, words: tuple[str, ...]) -> None:
    state = tmp_path / "state.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "cluster", "--state", str(state), *words],
        env=os.environ | {"PATH": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "this needs the command etcd: sudo apt-get install etcd-server\n"
    assert not state.exists()


class _Cluster:
    def __init__(self, disks: list[str]) -> None:
        self._disks = disks

    def with_disks(self) -> list[str]:
        return self._disks


def test_a_seed_is_an_order_of_faults():
    def drawn(seed: int, disks: list[str]) -> list[str]:
        draw = random.Random(seed)
        return [choose(draw, _Cluster(disks)) for _ in range(400)]

    assert drawn(1, ["c"]) == drawn(1, ["c"])
    assert drawn(1, ["c"]) != drawn(2, ["c"])
    assert set(drawn(1, ["c"])) == set(FAULTS)
    assert "full disk" not in drawn(1, []), "no node has a disk that may be filled"
    assert FAULTS.keys() >= ALONE


def test_no_disk_is_full_after_the_node_with_a_disk_own_was_lost(tmp_path: Path) -> None:
    """A round may draw a full disk after that node was wiped and replaced."""
    (tmp_path / "c").mkdir()
    cluster = FaultyCluster(tmp_path, {"c": tmp_path / "c"})
    assert "c" not in cluster.nodes, "it is not started here"
    begun = FAULTS["full disk"].fault(Scene(cluster, random.Random(1)))
    begun.heal()
    assert begun.words.startswith("no disk is full")
    assert not list((tmp_path / "c").iterdir())


CALLS: dict[str, tuple[set[str], set[str]]] = {
    "kill node": ({"kill"}, {"start"}),
    "freeze node": ({"freeze_process"}, {"thaw_process"}),
    "starve node": ({"starve_process"}, {"thaw_process"}),
    "starve all": ({"starve_process"}, {"thaw_process"}),
    "kill store": ({"store_process"}, set()),
    "freeze store": ({"store_process", "freeze_process"}, {"thaw_process"}),
    "kill etcd": ({"etcd.leader", "etcd.kill"}, {"start_member"}),
    "freeze etcd": ({"etcd.leader", "freeze_process"}, {"thaw_process"}),
    "cut pair": ({"network.cut"}, set()),
    "cut one way": ({"network.hold"}, set()),
    "cut from nodes": ({"network.cut"}, set()),
    "deaf node": ({"network.hold"}, set()),
    "cut from etcd": ({"network.cut"}, set()),
    "no etcd": ({"network.cut"}, set()),
    "cut from clients": ({"network.hold"}, set()),
    "cut from all": ({"network.cut"}, set()),
    "late": ({"network.delay"}, set()),
    "break": ({"network.reset"}, set()),
    "drain": ({"ask_to"}, {"insist"}),
    "full disk": ({"with_disks"}, set()),
    "wipe": ({"kill", "wipe"}, {"replace"}),
}
"""Fault -> what it does to the cluster, and how it is healed, whatever the dice say."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_does_what_the_cluster_can_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For those that are too long for test_faults.py. Calls that do not fit raise."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(faults.os, "kill", lambda *call: killed.append(call))
    monkeypatch.setattr(faults, "fill", lambda disk: disk / "filler")
    cluster = create_autospec(FaultyCluster, instance=True)
    cluster.network = create_autospec(Network, instance=True)
    cluster.network.reset.return_value = 1
    cluster.etcd = create_autospec(EtcdMembers, instance=True)
    cluster.etcd.leader.return_value = 2
    process = create_autospec(subprocess.Popen, instance=True, pid=7)
    cluster.etcd.processes = [process] * 3
    cluster.nodes = dict.fromkeys("abc", process)
    cluster.running.return_value = list("abc")
    cluster.member_names = ["m0", "m1", "m2"]
    cluster.disks = {"c": tmp_path}
    cluster.with_disks.return_value = ["c"]
    cluster.store_process.return_value = 8
    begun = [FAULTS[name].fault(Scene(cluster, random.Random(seed))) for seed in range(20)]
    done = calls_of(cluster)
    cluster.reset_mock()
    for each in begun:
        assert each.words
        each.heal()
    assert (done, calls_of(cluster)) == CALLS[name]
    assert bool(killed) == (name == "kill store")
    is_kill = name in {"kill node", "kill store", "kill etcd", "wipe"}
    assert {each.sigkills for each in begun} == {int(is_kill)}


def test_a_member_of_etcd_that_is_dead_is_not_killed_again() -> None:
    cluster = create_autospec(FaultyCluster, instance=True)
    cluster.etcd = create_autospec(EtcdMembers, instance=True)
    process = create_autospec(subprocess.Popen, instance=True)
    cluster.etcd.processes = [None, process, None]
    for seed in range(20):
        assert FAULTS["kill etcd"].fault(Scene(cluster, random.Random(seed))).sigkills == 1
    assert {call.args for call in cluster.etcd.kill.mock_calls} == {(1,)}
    cluster.etcd.processes = [None] * 3
    begun = FAULTS["kill etcd"].fault(Scene(cluster, random.Random(1)))
    assert (begun.words, begun.sigkills) == ("no member of etcd runs", 0)


def test_a_killed_process_that_nobody_waited_for_is_dead() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert is_alive(process.pid)
        process.kill()
        until(lambda: not is_alive(process.pid))
        assert process.returncode is None, "it was not waited for"
    assert not is_alive(process.pid)


@pytest.mark.parametrize(
    ("only", "pace"),
    [
        ((), run.USUAL),
        (("kill node", "cut pair"), run.OF_FEW),
        (("kill node", "kill store", "kill etcd"), run.KILLING),
        (("kill store",), run.KILLING),
    ],
)
def test_rounds_of_kills_only_are_in_haste(monkeypatch, only, pace) -> None:
    found: list[run.Pace] = []

    async def run_round(_folder, _seed, names, *, disks, pace):
        assert len(names) == (pace.faults if only else 0)
        assert set(names) <= set(only)
        found.append(pace)

    monkeypatch.setattr(run, "run_round", run_round)
    run.run_seed(1, only=only)
    assert found == [pace]


def calls_of(cluster: Any) -> set[str]:
    """Return the methods that were called, but for those that only look."""
    return {name for name, _, _ in cluster.mock_calls} - {"running"}


@pytest.fixture
def load() -> Load:
    load = Load(None, dict, 1)
    load.loaded.update({b"k": b"1", b"l": b"2"})
    load.maybe[b"m"] = b"3"
    return load


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({b"k": b"1", b"l": b"2"}, []),
        ({b"k": b"1", b"l": b"2", b"m": b"3"}, []),
        ({b"k": b"1"}, ["1 answered writes are lost or other ones: [b'l']"]),
        ({b"k": b"0", b"l": b"2"}, ["1 answered writes are lost or other ones: [b'k']"]),
        ({b"k": b"1", b"l": b"2", b"m": b"4"}, ["b'm' is b'4', and nobody wrote that"]),
    ],
)
def test_what_is_stored_is_held_against_the_answers(load, stored, words):
    assert list(_against_answers(stored, load)) == words


def test_copies_that_differ_are_named():
    assert different("node a", {b"k": b"1"}, {b"k": b"1"}) == []
    (text,) = different("node a", {b"k": b"1", b"x": b"2"}, {b"k": b"0"})
    assert text.startswith("node a differs in 2 keys")


async def test_a_stale_answer_ends_a_round(monkeypatch):
    """Everything else of a round is right here."""

    async def nothing(*_: object) -> list[str]:
        return []

    monkeypatch.setattr(run, "check_contents", nothing)
    monkeypatch.setattr(Load, "read_all", nothing)
    one = run.Round(None, None, None, 1)
    history = one.load.histories[b"register-3"]
    history += [
        Operation(Kind.WRITE, 0, 1, value=b"old", cas=1),
        Operation(Kind.WRITE, 2, 3, value=b"new", cas=2),
    ]
    await one.check()
    history.append(Operation(Kind.READ, 4, 5, found=b"old", cas=1, by="reader of b"))
    with pytest.raises(run.WrongError, match=r"register-3.*no order of these"):
        await one.check()
