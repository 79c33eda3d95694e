"""A small part of `scripts/soak attack`, and that its checks can fail."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from copy import copy, deepcopy
from pathlib import Path

import pytest

from support.raw_client import RawClient
from support.server import DcpdProcess
from support.waiting import until
from tests.soak.attack import run as run_module
from tests.soak.attack.case import AttackedServer, AttackError, Case, Fault, NotRunError, Stage
from tests.soak.attack.damage import Verdict, _Attack
from tests.soak.attack.folders import ARGUMENTS, MadeFolder
from tests.soak.attack.harm import Harm, apply, files_in
from tests.soak.attack.probe import WRONG, Watched
from tests.soak.attack.processes import PROBE_KEY, PROBE_VALUE, put_probe_key
from tests.soak.attack.run import attack, judge_probe, kind_of, on_stage, run_case
from tests.soak.attack.truth import keys_in, with_tokens

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.crash
SOUND = Verdict(0, frozenset())
NO_HARM = Harm("store/lock.mdb", "flip")


@pytest.fixture(autouse=True)
def soak_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with on_stage(tmp_path / "stage", is_short=True) as stage:
        yield stage


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of the table's rows, by kind."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    return {kind: cells for kind, *cells in lines}


def test_a_run_ends_with_a_table_and_goes_on_from_its_state_file(tmp_path: Path) -> None:
    def soak(cases: int) -> dict[str, list[str]]:
        done = subprocess.run(
            [
                sys.executable, "-m", "tests.soak", "attack", "--cases", str(cases), "--seed", "7",
                "--kinds", "damage", "--state", str(tmp_path / "state.json"),
                "--folder", str(tmp_path / "work"),
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=100, check=True,
        ).stdout  # fmt: skip
        assert "FAILED" not in done
        return rows(done)

    first, second = soak(1), soak(2)
    assert list(first) == ["kind", "---", "damage", "all"]
    assert first["kind"][:4] == ["cases", "wrong answers", "unnamed damage", "crashes, hangs"]
    assert first["all"][:4] == ["1", "0", "0", "0"]
    assert second["all"][:4] == ["2", "0", "0", "0"]
    assert not list((tmp_path / "work").iterdir()), "cases that passed leave nothing"


def test_a_failed_case_is_told_kept_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(case: Case) -> None:
        (case.folder / "evidence").touch()
        case.demand(False, Fault.WRONG, "a document is gone")

    def skip(_case: Case) -> None:
        raise NotRunError("nobody may mount a disk")

    kinds = {kind: run_module.KINDS[kind] for kind in ("garbage", "disk")}
    monkeypatch.setattr(run_module, "KINDS", kinds)
    monkeypatch.setitem(kinds, "garbage", (1, lose))
    monkeypatch.setitem(kinds, "disk", (1, skip))
    state, place = tmp_path / "state.json", tmp_path / "work"
    seeds = [seed for seed in range(5_000_000, 5_000_100) if kind_of(seed) == "garbage"]
    for cases in (1, 2):
        assert attack(state, seed=5, cases=cases, folder=place) == 1
        out = capsys.readouterr().out
        assert rows(out)["garbage"][:4] == [str(cases), str(cases), "0", "0"]
        for seed in seeds[:cases]:
            told = f"FAILED: scripts/soak attack --case {seed}   garbage: wrong answer: a document"
            assert told in out
            assert (place / f"case-{seed}" / "evidence").exists()
    assert "did not run: disk: nobody may mount a disk" in out
    assert json.loads(state.read_text())["next"] == seeds[1] - 5_000_000 + 1
    assert attack(state, seed=6, cases=0, folder=place) == 0, "another seed begins anew"


def test_a_short_case_passes(stage: Stage) -> None:
    outcome = run_case(4, stage, "cas")
    assert outcome.reason == ""
    assert outcome.measured.worst_s["read"] > 0


def test_a_page_that_is_outdated_is_refused_or_answered_right(stage: Stage) -> None:
    """`stale page`: some pages are used by what the case asks for, others by nothing."""
    for seed in range(3):
        outcome = run_case(seed, stage, "stale page")
        assert outcome.reason == ""
        assert "as after merge" in outcome.case.words


def test_a_cluster_whose_metadata_store_goes_back_loses_nothing(stage: Stage) -> None:
    outcome = run_case(3, stage, "restored store")
    assert outcome.reason == ""
    assert "documents" in outcome.case.words


# -- that checks can fail --------------------------------------------------------------------------


def case_on(stage: Stage) -> Case:
    folder = stage.folder / "case"
    folder.mkdir()
    return Case("damage", 1, folder, stage)


def test_the_probe_tells_a_wrong_value(stage: Stage, tmp_path: Path) -> None:
    case = case_on(stage)
    with DcpdProcess(tmp_path / "data") as server:
        put_probe_key(server.port)

        def is_found(value: str) -> bool:
            case.measured.troubles.clear()
            key = PROBE_KEY.decode()
            case.watch(Watched(server.port, server.admin_port, key, value))
            case.rest()
            return any(WRONG in text for text in case.measured.troubles)

        assert not is_found(PROBE_VALUE.decode())
        assert case.measured.worst_s["livez"] > 0
        until(lambda: is_found("a lie"))
    judge_probe(case, case.measured)
    assert [finding.fault for finding in case.findings] == [Fault.WRONG]


def test_the_probe_tells_silence(stage: Stage) -> None:
    case = case_on(stage)

    def is_found() -> bool:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            case.watch(Watched(port, port))
            case.rest()
        judge_probe(case, case.measured, hang_s=0.1)
        return any("the probe's read was not answered" in text for _, text in case.findings)

    until(is_found)
    assert Fault.BROKEN in {finding.fault for finding in case.findings}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeFolder:
    return MadeFolder(tmp_path_factory.mktemp("made"), random.Random(1))


def test_a_folder_without_an_answered_write_is_wrong(
    stage: Stage, made: MadeFolder, tmp_path: Path
) -> None:
    case, known = case_on(stage), copy(made)
    sound = AttackedServer(made.copy(tmp_path / "sound"), *ARGUMENTS)
    _Attack(case, made, NO_HARM, SOUND, sound).run()
    assert not case.findings
    known.history = deepcopy(made.history)
    newer = made.copy(tmp_path / "newer")
    with AttackedServer(newer, *ARGUMENTS) as server, RawClient(server.port) as client:
        key = keys_in(made.history.changes, 1, b"later")[0]
        known.history.write(with_tokens(client), [(key, b"answered", 0)])
    old = AttackedServer(made.copy(tmp_path / "old"), *ARGUMENTS)
    lost = _Attack(case, known, NO_HARM, SOUND, old)
    try:
        with pytest.raises(AttackError, match="are not there") as info:
            lost.run()
    finally:
        case.rest()
        lost.server.close()
    assert info.value.fault == Fault.WRONG


def test_damage_that_verify_does_not_name_is_a_fault(
    stage: Stage, made: MadeFolder, tmp_path: Path
) -> None:
    case = case_on(stage)
    damaged = made.copy(tmp_path / "damaged")
    log = next(name for name in files_in(damaged) if name.endswith(".log") and "log/" in name)
    harm = Harm(log, "zero", 5000, 512)
    assert apply(damaged, harm)
    lied_to = _Attack(case, made, harm, SOUND, AttackedServer(damaged, *ARGUMENTS))
    try:
        lied_to.run()
    finally:
        case.rest()
        lied_to.server.close()
    assert [finding.fault for finding in case.findings] == [Fault.UNNAMED]
    assert "verify names nothing, but the server refuses" in case.findings[0].text
