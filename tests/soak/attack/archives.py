"""The kind `archive`: one file of a backup archive is damaged, then checked, then restored.

What may happen
- `dcpctl backup verify` names the damage; a restore is refused with the file's name, or restores a
  part and says which (exit code 8): the partitions that it names come back in an earlier state, the
  others are complete and right;
- the archive is sound, and a restore is complete and right;
- no restore of the newest state needs the damaged file; then it is complete and right, too.

Each restored document is one that the server once had; without --salvage each partition is in a
state that it once had.

An archive is made once for several cases: backup runs of a server with writes between them. In some
archives a partition's history branches before the last run.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from support.raw_client import RawClient
from tests.soak.attack.case import AttackedServer, Case, Fault
from tests.soak.attack.commands import Told, dcpctl
from tests.soak.attack.harm import Harm, apply, draw_harm
from tests.soak.attack.probe import Watched
from tests.soak.attack.truth import (
    History,
    Wanted,
    get_all,
    keys_in,
    some_of,
    value_of,
    with_tokens,
)
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

CASES_PER_ARCHIVE: Final = 40
PARTITIONS: Final = 10
KEYS: Final = 150
PARTIAL: Final = 8
"""Exit code: partly done; what is missing is named."""


class MadeArchive:
    """An archive of several runs, and what the server held."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.path = folder / "archive"
        self.history = History(sorted(draw.sample(range(NUM_VBUCKETS), PARTITIONS)))
        self._changes: dict[bytes, int] = {}
        self.runs = draw.randint(2, 4)
        self.server = AttackedServer(folder / "data")
        self.server.start()
        try:
            self._make(draw)
        except BaseException:
            self.server.close()
            raise

    def _make(self, draw: random.Random) -> None:
        keys = keys_in(self.history.changes, KEYS)
        newest_only = ("--newest-only",) if draw.random() < 0.3 else ()
        for run in range(self.runs):
            with RawClient(self.server.port) as client:
                self.history.write(with_tokens(client), self._part(keys, draw))
            self.back_up(self.path, *newest_only)
            if run == self.runs - 2 and draw.random() < 0.5:
                self._branch(draw)

    def back_up(self, archive: Path, *more: str) -> Told:
        at = ("--server", self.server.address, "backup", "run", "--archive", archive)
        return dcpctl(*at, *more, "-o", "json").check()

    def close(self) -> None:
        self.server.close()

    def _part(self, keys: list[bytes], draw: random.Random) -> list[Wanted]:
        changes: list[Wanted] = []
        for key in draw.choices(keys, k=draw.randint(50, 300)):
            if draw.random() < 0.15:
                changes.append((key, None, 0))
                continue
            self._changes[key] = number = self._changes.get(key, 0) + 1
            changes.append((key, value_of(key, number), 0))
        return changes

    def _branch(self, draw: random.Random) -> None:
        """Undo the last changes of a partition, so that the next run finds another history."""
        vb_id = draw.choice([vb for vb, row in self.history.changes.items() if len(row) > 3])
        row = self.history.changes[vb_id]
        at = row[-draw.randint(2, len(row) // 2 + 1)].seqno
        self.server.branch(vb_id, at)
        self.history.branch(vb_id, at)


def run(case: Case) -> None:
    made = case.share("archive", CASES_PER_ARCHIVE, MadeArchive)
    archive = Path(shutil.copytree(made.path, case.folder / "archive"))
    harm = draw_harm(archive, case.draw)
    has_effect = apply(archive, harm)
    case.note(f"{made.runs} runs, {harm}")
    _Attack(case, made, archive, harm, has_effect=has_effect).run()


class _Attack:
    """One damaged archive."""

    def __init__(
        self, case: Case, made: MadeArchive, archive: Path, harm: Harm, *, has_effect: bool
    ) -> None:
        self.case, self.made, self.archive, self.harm = case, made, archive, harm
        self.has_effect = has_effect
        self.history = made.history

    def run(self) -> None:
        told = self.ctl("verify")
        self.case.demand(told.code in {0, 1}, Fault.UNNAMED, f"verify: {told.code} {told.err!r}")
        is_sound = not told.code
        self.case.note("sound" if is_sound else "damage found")
        if not is_sound:
            self.named(told)
        if not self.has_effect:
            text = f"verify names damage where there is none: {told.text}"
            self.case.demand(is_sound, Fault.WRONG, text)
        way = self.case.draw.choice(("restore", "export", "restore", "salvage", "go on"))
        self.case.note(way)
        if way == "go on":
            self.go_on()
        elif way == "export":
            self.export(is_sound=is_sound)
        else:
            self.restore(is_sound=is_sound, salvages=way == "salvage")

    def ctl(self, *arguments: object, server: AttackedServer | None = None) -> Told:
        at = () if server is None else ("--server", server.address)
        command, *more = arguments
        return dcpctl(*at, "backup", command, "--archive", self.archive, "-o", "json", *more)

    def named(self, told: Told) -> None:
        """Require that a text names the damaged file."""
        path = Path(self.harm.path)
        names = [str(path), path.name]
        if self.harm.kind == "remove":
            names.append(str(path.parent))  # a file in a removed folder is named by the folder
        is_named = any(name in told.text for name in names)
        text = f"{told.command} does not name {self.harm.path}: {told.text[-500:]!r}"
        self.case.demand(is_named, Fault.UNNAMED, text)

    # -- restoring -----------------------------------------------------------------------------

    def restore(self, *, is_sound: bool, salvages: bool) -> None:
        server = AttackedServer(self.case.folder / "target")
        server.start()
        try:
            self.case.watch(Watched(server.port, server.admin_port))
            more = ("--salvage",) if salvages else ()
            told = self.ctl("restore", *more, server=server)
            if self.refused(told, is_sound=is_sound):
                return
            with RawClient(server.port) as client:
                frames = get_all(client, self.history.keys)
            found = {key: frame.value for key, frame in frames.items() if not frame.status}
            self.judge(told, found, salvages=salvages)
            server.check(self.case)
        finally:
            self.case.rest()
            server.close()

    def export(self, *, is_sound: bool) -> None:
        path = self.case.folder / "documents.jsonl"
        told = self.ctl("export", "--to", path)
        if self.refused(told, is_sound=is_sound):
            return
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found = {row["key"].encode(): value_in(row) for row in rows}
        self.judge(told, found, salvages=False)

    def refused(self, told: Told, *, is_sound: bool) -> bool:
        """Return whether a restore was refused; if so, require that it names the damage."""
        if told.code in {0, PARTIAL}:
            return False
        text = f"verify finds the archive sound, and {told.command} says {told.err!r}"
        self.case.demand(not is_sound, Fault.UNNAMED, text)
        self.named(told)
        self.case.note("refused")
        return True

    def judge(self, told: Told, found: Mapping[bytes, bytes], *, salvages: bool) -> None:
        """Compare the restored documents with those of the server."""
        (report,) = told.documents()
        self.case.note(str(report["result"]))
        damaged = {damage["vb_id"] for damage in report["damages"]}
        damaged |= {int(vb_id) for vb_id in report["earlier"]}
        has_all = bool(report["broken"])  # a missing run affects every partition
        text = f"exit code {told.code} with {report['broken']}, damages {report['damages'][:3]}"
        is_told = told.code == (PARTIAL if report["damages"] or has_all else 0)
        self.case.demand(is_told, Fault.UNNAMED, text)
        for vb_id in self.history.changes:
            state = {key: item.value for key, item in self.history.state(vb_id).items()}
            have = {key: value for key, value in found.items() if vbucket_of(key) == vb_id}
            if have == state:
                continue
            keys = sorted(k for k in have | state if have.get(k) != state.get(k))
            where = f"vb {vb_id}: {some_of(keys)}"
            is_damaged = has_all or vb_id in damaged
            self.case.demand(is_damaged, Fault.WRONG, f"{where} came back changed, silently")
            if salvages:
                self.all_were_once(vb_id, have)
            else:
                was = self.history.was_ever(vb_id, have)
                self.case.demand(was, Fault.WRONG, f"{where}: the partition never had this state")

    def all_were_once(self, vb_id: int, have: Mapping[bytes, bytes]) -> None:
        for key, value in have.items():
            was = self.history.has_had(vb_id, key, value)
            self.case.demand(was, Fault.WRONG, f"salvage: {key!r} was never {value!r:.90}")

    # -- another run ---------------------------------------------------------------------------

    def go_on(self) -> None:
        """Run another backup: it is refused, or its result can be restored."""
        told = self.ctl("run", server=self.made.server)
        if told.code:
            self.named(told)
            self.case.note("refused")
            return
        told = self.ctl("verify")
        self.restore(is_sound=not told.code, salvages=False)


def value_in(row: dict[str, Any]) -> bytes:
    """Return the value of an exported document, which is text if possible."""
    value: str = row["value"]
    return base64.b64decode(value) if "value_encoding" in row else value.encode()
