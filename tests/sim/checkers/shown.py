"""What scans and X_READ_HASHES show: a partition as it was at one moment. What a copy may take of
another one. Pure.

Documents that may be due are left out of scans here: a scan does not show what is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dcp.wire.hash_reads import KeyVersion, SentDocument
from sim.clock import WALL_START_NS
from sim.facts import LASTS_S, Damaged, Excuse, HashesRead, Repair, Scanned
from sim.ledger import Change, Ledger, Span, advance, end_of
from sim.world import MS, SECOND
from vbucket.native.key_hashes import hash_of_document, hash_of_key

SUM_MAX = 2**64
LASTING_S = WALL_START_NS // SECOND + LASTS_S // 2
"""What expires after that is not due in the run."""
PUT_RIGHT = "put right"
NAMED = "put right, because a merge or a start named it"
"""How a damage ends that nothing in the cluster has mended."""


def scans(scanned: Iterable[Scanned], ledger: Ledger, excuses: Sequence[Excuse] = ()) -> list[str]:
    """A scan has the documents of one moment between its request and the answer to that."""
    problems = []
    for scan in scanned:
        if _was_branched(excuses, scan.vb_id, scan.began_ns, scan.created_ns):
            continue
        shown = {
            key: (seqno, cas, value)
            for key, (expiry_s, seqno, cas, value) in scan.documents.items()
            if not expiry_s or expiry_s > LASTING_S
        }
        spans = ledger.spans(scan.vb_id, scan.began_ns, scan.created_ns)
        if spans and not any(_was_there(ledger, scan.vb_id, span, shown) for span in spans):
            span = spans[-1]
            state = _lasting(ledger.state(scan.vb_id, span.log, span.last_seqno))
            problems.append(
                f"{scan.client} scanned vb {scan.vb_id} at {scan.began_ns / MS:.3f} ms, and got"
                f" what was there at no moment until {scan.created_ns / MS:.3f}: at seqno"
                f" {span.last_seqno} {_difference(shown, state)}"
            )
    return problems


def _was_branched(excuses: Iterable[Excuse], vb_id: int, began_ns: int, ended_ns: int) -> bool:
    """Whether an operator may have undone meanwhile what was shown, before it was committed."""
    return any(
        each.vb_id == vb_id and each.kind == "branch" and began_ns <= each.at_ns <= ended_ns
        for each in excuses
    )


def _was_there(
    ledger: Ledger, vb_id: int, span: Span, shown: dict[bytes, tuple[int, int, bytes]]
) -> bool:
    state = ledger.state(vb_id, span.log, span.first_seqno)
    if _lasting(state) == shown:
        return True
    for change in ledger.changes(vb_id, span.log, span.first_seqno + 1, span.last_seqno):
        advance(state, change)
        if _lasting(state) == shown:
            return True
    return False


def _lasting(state: dict[bytes, Change]) -> dict[bytes, tuple[int, int, bytes]]:
    return {
        key: (change.seqno, change.cas, change.value or b"")
        for key, change in state.items()
        if not change.expiry_s or change.expiry_s > LASTING_S
    }


def _difference(
    shown: dict[bytes, tuple[int, int, bytes]], state: dict[bytes, tuple[int, int, bytes]]
) -> str:
    for key in sorted(shown.keys() | state.keys()):
        if shown.get(key) != state.get(key):
            return f"{key!r} is {_of(state.get(key))}, and it shows {_of(shown.get(key))}"
    return "they are equal"


def _of(document: tuple[int, int, bytes] | None) -> str:
    if document is None:
        return "nothing"
    return f"{document[2][:40]!r} of seqno {document[0]}, CAS {document[1]:x}"


def hashes(
    read: Iterable[HashesRead],
    by_seqno: Sequence[tuple[int, int, SentDocument]],
    ledger: Ledger,
    excuses: Sequence[Excuse] = (),
) -> list[str]:
    """Sums and keys are those of a recount at the seqno told, which is not older than the request;
    a document that is read by its seqno is the change with that seqno.
    """
    problems = []
    for answer in read:
        where = f"{answer.client} read vb {answer.vb_id} at {answer.ended_ns / MS:.3f} ms"
        spans = [
            span
            for span in ledger.spans(answer.vb_id, answer.began_ns, answer.ended_ns)
            if span.first_seqno <= answer.seqno
            # A former master may answer as of the end of its version: the next begins there, and
            # need not know yet that so much is committed.
            and answer.seqno
            <= (end_of(span.log, answer.vb_uuid, max(span.last_seqno, span.log[0][1])) or 0)
        ]
        if not spans and not _was_branched(excuses, answer.vb_id, answer.began_ns, answer.ended_ns):
            problems.append(
                f"{where} as of version {answer.vb_uuid:x} seqno {answer.seqno}, where it was not"
            )
        if not spans:
            continue
        state = ledger.state(answer.vb_id, spans[0].log, answer.seqno)
        problems += [f"{where}, and {what}" for what in _unlike(answer, state)]
    for vb_id, uuid, document in by_seqno:
        version = document.version
        change = ledger.change(vb_id, uuid, version.seqno)
        if change is not None and _version(change) == version and change.value == document.value:
            continue
        if change is not None:  # a seqno of an older version is not looked for
            problems.append(f"vb {vb_id}: read by its seqno, {version} is not {change}")
    return problems


def repairs(taken: Iterable[Repair]) -> list[str]:
    """What a copy may take of another one is what it had itself. Some may be compacted there. What
    was put in place is, to the byte, what was there.
    """
    taken = tuple(taken)
    wrong = [
        f"{each.node} put versions {sorted(each.taken)} of vb {each.vb_id} from {each.source} in"
        f" place at {each.at_ns / MS:.3f} ms, and its block is not what it was"
        for each in taken
        if each.put is False
    ]
    return wrong + [
        f"{each.node} may take seqno {seqno} of vb {each.vb_id} from {each.source} at"
        f" {each.at_ns / MS:.3f} ms: {version}, and it had {each.own[seqno]}"
        for each in taken
        for seqno, version in each.taken.items()
        if each.own.get(seqno, version) != version
    ]


def damages(damaged: Iterable[Damaged]) -> list[str]:
    """Each is mended to the byte, or named before a backup puts it right. A merge asks no other
    copy: it names what the node cannot prove alone.
    """
    problems = []
    for each in damaged:
        if each.is_put_wrong:
            problems.append(f"{each}: something else was put in its place")
        elif each.told_mended:
            problems.append(f"{each}: it counts as mended ({each.told_mended}), and is not")
        elif each.must_mend and (
            each.ended == PUT_RIGHT or (each.ended == NAMED and each.provers is None)
        ):
            problems.append(f"{each}: it could be proven, and was not mended in time")
        elif each.ended == PUT_RIGHT and not each.named:
            problems.append(f"{each}: it was neither mended nor named")
    return problems


def _unlike(answer: HashesRead, state: dict[bytes, Change]) -> Iterable[str]:
    if answer.documents != len(state):
        yield f"it counts {answer.documents} documents: seqno {answer.seqno} has {len(state)}"
    elif answer.versions is not None:
        wanted = [_version(state[key]) for key in sorted(state)]
        if answer.versions != wanted:
            yield f"its keys are not those of seqno {answer.seqno}: {answer.versions}, not {wanted}"
    else:
        found = (
            hash_of_document(hash_of_key(key), change.cas, change.rev_seqno)
            for key, change in state.items()
        )
        if sum(found) % SUM_MAX != int.from_bytes(answer.sums, "big"):
            yield f"its sum is not that of a recount at seqno {answer.seqno}"


def _version(change: Change) -> KeyVersion:
    return KeyVersion(change.key, change.cas, change.seqno, change.rev_seqno)
