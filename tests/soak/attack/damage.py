"""The kind `damage`: one file of a stopped data folder is damaged, then checked, then served.

What may happen
- the server refuses to start and names the file and the place;
- it starts, and every read of every document, by GET and by a stream from the beginning or from a
  saved position, gives the right value or an error, and `dcpctl verify` names the damage;
- nothing, because the damage has no effect.

If a refusal names a page of the store's file, that page must be damaged: other pages are served as
before. After a refusal because of the log, `--accept-log-loss` must name everything that it gives
up, and roll back every consumer that has seen it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from clients.testing.process import ServerRefusedError, ServerStartError
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from tests.soak.attack.case import AttackedServer, Case, Fault, traceback_in
from tests.soak.attack.commands import Told, dcpctl
from tests.soak.attack.folders import ARGUMENTS, PASSWORDS, MadeFolder
from tests.soak.attack.harm import Harm, apply, draw_harm, files_in
from tests.soak.attack.probe import Watched
from tests.soak.attack.streams import Followed, follow
from tests.soak.attack.truth import (
    Reading,
    get_all,
    high_seqnos,
    judge,
    keys_in,
    set_packet,
    some_of,
    value_of,
    words_of,
)
from vbucket.model.ids import vbucket_of

CASES_PER_FOLDER: Final = 40
ACCEPT: Final = "--accept-log-loss"
_SEGMENT: Final = re.compile(r"log/0*(\d+)\.log\Z")
DATA: Final = "store/data.mdb"
USERS: Final = "users.json"
_MAY_CHANGE: Final = frozenset({"lock", "store/lock.mdb", "audit.log"})
"""Files that a refused start may write."""
_PAGE: Final = re.compile(r"\bpage (\d+)")
_IN_PLACE: Final = frozenset({"flip", "zero", "noise"})
"""Damage that does not move the bytes around it."""
NO_USERS: Final = "a missing users.json means that there are no users"


class Verdict(NamedTuple):
    """The result of `dcpctl verify` for a folder."""

    code: int
    """0 no damage, 1 damage, 2 the folder cannot be checked."""
    kinds: frozenset[str]


def run(case: Case) -> None:
    made = case.share("folder", CASES_PER_FOLDER, MadeFolder)
    damaged = made.copy(case.folder / "damaged")
    harm = draw_harm(damaged, case.draw)
    has_effect = apply(damaged, harm)
    case.note(f"{made.words}: {harm}")
    attack(case, made, damaged, harm, has_effect=has_effect)


def attack(
    case: Case, made: MadeFolder, damaged: Path, harm: Harm, *, has_effect: bool = True
) -> None:
    """Check a damaged copy of a folder, and serve it."""
    verdict = verify(case, damaged)
    case.note(f"verify: {sorted(verdict.kinds) or verdict.code}")
    if not has_effect:
        case.demand(verdict.code == 0, Fault.WRONG, "verify finds something where nothing is")
    data = Path(shutil.copytree(damaged, case.folder / "data"))
    attacked = _Attack(case, made, harm, verdict, AttackedServer(data, *ARGUMENTS))
    try:
        attacked.run()
    finally:
        case.rest()
        attacked.server.close()


def verify(case: Case, folder: Path) -> Verdict:
    """Run `dcpctl verify`, which must not change anything."""
    before = contents(folder)
    told: Told = dcpctl("verify", "-o", "json", folder)
    case.demand(contents(folder) == before, Fault.BROKEN, "dcpctl verify changed the folder")
    case.demand(told.code in {0, 1, 2}, Fault.BROKEN, f"verify ended with {told.code}")
    rows = [row for row in told.documents() if "kind" in row and not row.get("harmless")]
    if told.code == 2:
        case.demand(told.err.strip(), Fault.UNNAMED, "verify refuses without words")
    return Verdict(told.code, frozenset(row["kind"] for row in rows))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_in(folder)}


def names_of(path: str) -> list[str]:
    """Return the words that name a damaged file."""
    if found := _SEGMENT.search(path):
        return [Path(path).name, f"segment {found[1]}"]
    words = [path, Path(path).name, *Path(path).parts[:1]]
    if path == "dcpd-folder":
        words.append("is not a dcpd data folder")
    return words


class _Attack:
    """One damaged folder and its server."""

    def __init__(
        self, case: Case, made: MadeFolder, harm: Harm, verdict: Verdict, server: AttackedServer
    ) -> None:
        self.case, self.made, self.harm, self.verdict = case, made, harm, verdict
        self.server = server
        self.history = made.history

    def run(self) -> None:
        before = contents(self.server.data)
        refusal = self.start()
        if not refusal:
            self.judge()
            return
        self.case.note("refused")
        is_named = any(word in refusal for word in names_of(self.harm.path))
        self.case.demand(is_named, Fault.UNNAMED, f"the refusal names no place: {refusal!r}")
        after = contents(self.server.data)
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        changed -= _MAY_CHANGE
        if not before.get(DATA):
            changed.discard(DATA)  # LMDB creates an empty one if it is missing
        self.case.demand(not changed, Fault.BROKEN, f"a refused start changed {sorted(changed)}")
        is_cut = self.harm.path == DATA and self.harm.kind == "cut"
        self.case.demand(self.verdict.code or not is_cut, Fault.UNNAMED, "verify: not cut short")
        if not self.verdict.code:
            text = f"verify names nothing, but the server refuses: {refusal!r}"
            self.case.find(Fault.UNNAMED, text)
        if ACCEPT in refusal:
            self.accept_loss()

    def start(self, *more: str) -> str:
        """Start the server; return why it refused to start, "" if it did start."""
        self.server._arguments = (*ARGUMENTS, *more)
        try:
            self.server.start()
        except ServerStartError:
            text, code = self.server.said(), self.server.exit_code
            if trouble := traceback_in(text):
                self.case.demand(
                    False, Fault.BROKEN, f"the start ended with a traceback: {trouble}"
                )
            is_end = code is not None and code > 0
            self.case.demand(is_end, Fault.BROKEN, f"the start ended by {code}: {text[-500:]!r}")
            return text or "(nothing)"
        watched = Watched(self.server.port, self.server.admin_port)
        self.case.watch(watched)
        return ""

    def judge(self) -> None:
        """Check a server that has started: read everything, write more, read it again."""
        self.check_reads()
        self.check_streams(self.history_ends(), at=None)
        self.check_logins()
        self.go_on()
        self.check_reads()
        self.server.check(self.case)
        self.case.rest()
        code = self.server.stop()
        text = self.server.said()
        self.case.demand(code == 0 or "damaged" in text, Fault.BROKEN, f"stop: {code} {text!r}")

    # -- documents -----------------------------------------------------------------------------

    def read(self, at: Mapping[int, int] | None = None) -> Reading:
        with RawClient(self.server.port) as client:
            frames = get_all(client, self.history.keys)
        return judge(frames, self.history.known(at))

    def check_reads(self) -> None:
        reading = self.read()
        reading.check_nothing_wrong()
        if reading.missing:
            self.missing(f"GET says that {some_of(reading.missing)} are not there")
        if reading.refused:
            self.refused("GETs", reading.refused)
            part = len(reading.refused) / len(self.history.keys)
            self.case.note(f"{100 * part:.0f}% of GETs refused")

    def missing(self, text: str) -> None:
        self.case.demand(False, Fault.WRONG, text)

    def refused(self, what: str, refusals: Mapping[Any, str]) -> None:
        """Check a refusal of reads: verify must name the cause."""
        place, words = next(iter(refusals.items()))
        if self.harm.path == DATA and self.harm.kind in _IN_PLACE:
            named = {int(page) for text in refusals.values() for page in _PAGE.findall(text)}
            others = named - set(self.harm.pages)
            text = f"{what} are refused for pages {sorted(others)}, which were not damaged"
            self.case.demand(not others, Fault.UNNAMED, text)
        if not self.verdict.code:
            text = f"verify names nothing, but {what} are refused: {place!r}: {words}"
            self.case.find(Fault.UNNAMED, text)
        if ":" not in words:
            self.case.find(Fault.UNNAMED, f"{what} are refused without words: {words}")

    # -- streams -------------------------------------------------------------------------------

    def history_ends(self) -> dict[int, int]:
        with RawClient(self.server.port) as client:
            seqnos = high_seqnos(client)
        return {vb_id: seqnos[vb_id] for vb_id in self.history.changes if vb_id in seqnos}

    def check_streams(self, ends: dict[int, int], at: Mapping[int, int] | None) -> None:
        """Follow all partitions from the beginning, from the middle and from the end."""
        for name, starts in (("0", {}), ("early", self.made.early), ("late", self.made.late)):
            for vb_id, followed in follow(self.server.port, ends, starts).items():
                place = starts.get(vb_id)
                held: dict[bytes, bytes] = {}
                if place is not None:
                    held = values(self.history.state(vb_id, place.seqno))
                self.check_stream(f"vb {vb_id} from {name}", followed, held, vb_id, at)

    def check_stream(
        self,
        what: str,
        followed: Followed,
        held: dict[bytes, bytes],
        vb_id: int,
        at: Mapping[int, int] | None,
    ) -> None:
        if followed.rollback_to is not None:
            return
        if not followed.is_whole:
            reason = followed.refusal or f"ended: reason {followed.reason}"
            self.refused("streams", {what: reason})
            return
        expected = values(self.history.state(vb_id, None if at is None else at[vb_id]))
        found = followed.applied_to(held)
        if found != expected:
            keys = sorted(k for k in found | expected if found.get(k) != expected.get(k))
            text = f"{what}: the consumer was told OK and holds another {some_of(keys)}"
            self.case.demand(False, Fault.WRONG, text)

    # -- users ---------------------------------------------------------------------------------

    def check_logins(self) -> None:
        """Check that users can log in with the same rights as before, and nobody else can."""
        key = next(iter(self.history.keys))
        for name, password in PASSWORDS.items():
            with RawClient(self.server.port) as client:
                wrong = client.log_in(name, f"not-{password}")
                self.case.demand(wrong.status, Fault.WRONG, f"{name} got in with a wrong password")
            with RawClient(self.server.port) as client:
                status = client.log_in(name, password).status
                self.login_differs(status, f"{name} cannot log in any more (0x{status:02x})")
                if status:
                    continue
                client.ask(Opcode.SELECT_BUCKET, key=b"default")
                own = client.ask(Opcode.GET, key=key, vb_id=vbucket_of(key)).status
                other = client.ask(Opcode.GET, key=b"other", vb_id=vbucket_of(b"other")).status
                self.login_differs(own == Status.EACCESS, f"{name} may not read its keys any more")
                has_more = name == "bob" and other != Status.EACCESS
                self.login_differs(has_more, f"{name} may read everything")

    def login_differs(self, is_other: object, text: str) -> None:
        if is_other and (self.harm.path, self.harm.kind) == (USERS, "remove"):
            self.case.documented.append(NO_USERS)
            return
        self.case.demand(not is_other, Fault.UNNAMED, f"nothing says why {text}")

    # -- continuing ----------------------------------------------------------------------------

    def go_on(self) -> None:
        """Write to every partition, merge, and read that back."""
        keys = keys_in(self.history.changes, 60, b"new")
        stored: list[bytes] = []
        with RawClient(self.server.port) as client:
            for key in keys:
                client.send(set_packet(key, value_of(key, 1)))
            refused: dict[bytes, str] = {}
            for key in keys:
                frame = client.receive()
                self.case.demand(frame is not None, Fault.BROKEN, "the server closed")
                assert frame is not None
                if frame.status:
                    refused[key] = words_of(frame)
                else:
                    stored.append(key)
            if refused:
                self.refused("SETs", refused)
            try:
                self.server.compact()
            except ServerRefusedError as error:
                self.refused("compactions", {"": str(error)})
            for key, frame in get_all(client, stored).items():
                if frame.status == Status.KEY_ENOENT:
                    self.missing(f"{key!r} was stored and is not there")
                elif not frame.status:
                    is_right = frame.value == value_of(key, 1)
                    self.case.demand(is_right, Fault.WRONG, f"{key!r} is {frame.value!r:.90}")

    # -- giving up a part of the log -------------------------------------------------------------

    def accept_loss(self) -> None:
        """Lost seqnos must be named, a prefix must stay, and consumers that saw more roll back."""
        refusal = self.start(ACCEPT)
        if refusal:
            self.case.note("refused again")
            return
        self.case.note("loss accepted")
        receipt = self.receipt()
        ends = self.history_ends()
        reading = self.read(ends)
        reading.check_nothing_wrong()
        if reading.missing:
            self.missing(f"GET says that {some_of(reading.missing)} are not there")
        for vb_id, end in ends.items():
            last = self.history.high_seqno(vb_id)
            if end < last:
                self.check_named(vb_id, end, last, receipt)
        self.check_streams(ends, ends)
        late = follow(self.server.port, ends, self.made.late)
        for vb_id, followed in late.items():
            if ends[vb_id] < self.made.late[vb_id].seqno:
                back = followed.rollback_to
                text = f"vb {vb_id}: a consumer that saw lost seqnos was told {vars(followed)}"
                self.case.demand(back is not None and back <= ends[vb_id], Fault.WRONG, text)
        self.server.check(self.case)
        self.case.rest()
        self.case.demand(self.server.stop() == 0, Fault.BROKEN, "no clean stop after a loss")

    def receipt(self) -> dict[str, Any]:
        folders = sorted(self.server.data.glob("lost-log-*"))
        self.case.demand(folders, Fault.UNNAMED, "a loss was accepted, and there is no receipt")
        found: dict[str, Any] = json.loads((folders[-1] / "receipt.json").read_text())
        return found

    def check_named(self, vb_id: int, end: int, last: int, receipt: dict[str, Any]) -> None:
        where = f"vb {vb_id}: seqnos {end + 1} to {last} are lost"
        is_new = vb_id in receipt["new_versions"]
        self.case.demand(is_new, Fault.UNNAMED, f"{where}, and it has no new version")
        rows = [row for row in receipt["lost"] if row["vb"] == vb_id]
        is_told = any(row["first_seqno"] <= end + 1 and row["last_seqno"] >= last for row in rows)
        is_told = is_told or not receipt["is_complete"]
        self.case.demand(is_told, Fault.UNNAMED, f"{where}, the receipt says {rows}")


def values(state: Mapping[bytes, Any]) -> dict[bytes, bytes]:
    return {key: stored.value for key, stored in state.items()}
