"""The story of a failing seed: one page that somebody who does not know the code can follow.

    run the seed ── it fails ──> run it again, and stop where the check fails first ──> tell

The second run is the same run: the observer draws nothing and makes no events. What a story adds is
told at each event: how far every node has come in every partition.
"""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from textwrap import wrap
from typing import Any, Final, NamedTuple

from failover.rules.isr import CONFIRMATION_NS, PROMOTED_WAIT_NS
from sim.checks import CRASH, DURING, RULES, Violation, linear, named
from sim.cluster_node import ClusterNode
from sim.facts import Kind
from sim.faults import FAULTS, FaultTold
from sim.machine import Machine
from sim.moments import Moment, names, short
from sim.node import SingleNode
from sim.run import Options, Report, Simulation, replay_command
from sim.world import MS, SECOND
from vbucket.engine.partition import Partition, VbState
from vbucket.model.entry import META, is_deleted, key_of, seqno_of, value_of
from vbucket.store.environment import StoreDamagedError

WIDTH: Final = 100
FAULTS_SHOWN: Final = 24
MOMENTS_SHOWN: Final = 36
STEPS_SHOWN: Final = 24
OPERATIONS_SHOWN: Final = 16
CHANGES_SHOWN: Final = 8
"""Lines of each part: the last ones before the violation are shown."""
UNTOLD: Final = frozenset({"window full"})
"""Kinds of moments that are only counted: there are many, and they say little."""
_KEY: Final = re.compile(r"""(b'(?:[^'\\]|\\.)*'|b"(?:[^"\\]|\\.)*")""")
_SCENE: Final = {
    "cut": "nothing passes in one direction", "narrow": "little passes in one direction",
    "store_copied": "the metadata store is copied", "store_away": "the metadata store is away",
    "store_slow": "the metadata store is slow",
    "store_late": "news of the metadata store comes late",
    "store_forgets": "answers of the metadata store are lost",
    "store_compacts": "the metadata store compacts its history",
    "one_store_away": "the metadata store is away for one node",
    "one_store_deaf": "one node hears nothing new of the metadata store",
    "one_store_forgets": "answers of the metadata store to one node are lost",
    "one_store_forgets_write": "the store's answer to the next write of one node is lost",
    "crash_inside": "a process is killed within an event, at a write or sync",
    "power_cut_inside": "a machine loses power within an event, at a write or sync",
    "rebalance": "an operator asks for a rebalance", "move": "an operator moves a copy",
    "drain": "an operator drains a node, or takes that back",
    "set_copies": "an operator asks for another number of copies",
    "cancel": "an operator cancels the plan", "fail_over": "an operator fails a node over",
}  # fmt: skip
"""What faults do whose function has no sentence of its own."""


class FirstViolation(Exception):  # noqa: N818 - it ends a run, nothing has gone wrong in it
    """A check fails, or its time is over: the run ends here."""

    def __init__(self, found: list[Violation]) -> None:
        super().__init__(*(violation.text for violation in found))
        self.found = found


class Step(NamedTuple):
    """How far a node has come in a partition from some moment on."""

    at_ns: int
    node: str
    vb_id: int
    state: VbState
    epoch: int
    high_seqno: int
    synced_seqno: int
    committed_seqno: int


class About(NamedTuple):
    """What a violation is about, as far as its sentence says."""

    vb_id: int | None
    key: bytes | None
    seqno: int | None


class Observer:
    """Looks at a run after each event, and ends it where one of some checks fails."""

    def __init__(
        self,
        simulation: Simulation,
        checks: Iterable[str],
        key: bytes | None,
        until_ns: int | None,
    ) -> None:
        self._simulation = simulation
        self._until_ns = until_ns
        self._checks = frozenset(checks)
        self._key = key
        self._sizes: tuple[int, ...] = ()
        self._last: dict[tuple[str, int], Step] = {}
        self.steps: list[Step] = []

    def __call__(self) -> None:
        """Look. Raises FirstViolation."""
        self._note_steps()
        if self._until_ns is not None and self._simulation.world.now_ns > self._until_ns:
            raise FirstViolation([])
        facts = self._simulation.facts
        sizes = (
            len(facts.problems), len(facts.lacking), len(facts.on_few_disks), len(facts.overlaps),
            len(facts.kept), len(facts.masterships), len(facts.rolled_back), len(facts.histories),
            len(facts.streamed), self._ended(),
        )  # fmt: skip
        if sizes == self._sizes:
            return
        self._sizes = sizes
        found = [
            violation
            for check in DURING
            if check in self._checks
            for violation in named(check, DURING[check](facts))
        ]
        if not found and self._key is not None and "linearizable" in self._checks:
            of_key = [each for each in facts.operations if each.key == self._key]
            found = named("linearizable", linear(facts, self._simulation.plan, of_key)[0])
        if found:
            raise FirstViolation(found)

    def _ended(self) -> int:
        """Return how many operations on the key have ended."""
        if self._key is None:
            return 0
        operations = self._simulation.facts.operations
        return sum(each.key == self._key and each.ended_ns is not None for each in operations)

    def _note_steps(self) -> None:
        now_ns = self._simulation.world.now_ns
        for machine in self._simulation.machines:
            node = machine.node
            if not isinstance(node, SingleNode):
                continue
            for part in node.engine.partitions:
                key = machine.name, part.vb_id
                step = Step(
                    now_ns, machine.name, part.vb_id, part.state, part.leader_epoch,
                    part.high_seqno, part.synced_seqno, part.committed_seqno,
                )  # fmt: skip
                before = self._last.get(key)
                if before is None or before[1:] != step[1:]:
                    self._last[key] = step
                    self.steps.append(step)


def observed(
    seed: int,
    options: Options,
    checks: Iterable[str],
    key: bytes | None = None,
    until_ns: int | None = None,
) -> tuple[Simulation, Observer, list[Violation]]:
    """Run a seed, and stop where one of these checks fails first, or after `until_ns`; return what
    was found there.
    """
    simulation = Simulation(seed, options)
    observer = Observer(simulation, checks, key, until_ns)
    simulation.world.observer = observer
    try:
        report = simulation.run()
    except FirstViolation as error:
        return simulation, observer, error.found
    except Exception:  # noqa: BLE001 - whatever it is, the story tells it
        return simulation, observer, [Violation(CRASH, traceback.format_exc())]
    found = [Violation(*item) for item in zip(report.checks, report.violations, strict=True)]
    return simulation, observer, found


def tell(report: Report, options: Options) -> str:
    """Return the story of a seed that has failed."""
    subject = about(report.violations[0])
    simulation, observer, found = observed(report.seed, options, report.checks, subject.key)
    assert found, "the second run is the first one again"
    return Story(simulation, observer, found, options).text()


def about(text: str) -> About:
    """Return what a violation's sentence is about."""
    vb_ids = re.findall(r"\b(?:vb|partition) (\d+)", text)
    seqnos = re.findall(r"\bseqno (\d+)", text)
    keys = _KEY.findall(text)
    key = ast.literal_eval(keys[0]).removeprefix(b"\x00") if keys else None
    return About(
        int(vb_ids[0]) if vb_ids else None, key, int(seqnos[0]) if seqnos else None
    )  # fmt: skip


def what_it_does(fault: str) -> str:
    """Return what a kind of fault does, in words."""
    if fault in _SCENE:
        return _SCENE[fault]
    text = FAULTS[fault].__doc__
    assert text is not None, f"{fault} does not say what it does"
    first = re.sub(r"\s+", " ", text).strip().partition(". ")[0].rstrip(".")
    return first[:1].lower() + first[1:]


class Story:
    """The page. Each method yields the lines of one part."""

    def __init__(
        self,
        simulation: Simulation,
        observer: Observer,
        found: list[Violation],
        options: Options,
    ) -> None:
        self._simulation = simulation
        self._steps = observer.steps
        self._found = found
        self._options = options
        self._now_ns = simulation.world.now_ns
        subject = about(found[0].text)
        vb_id = subject.vb_id
        if vb_id is None and subject.key is not None:
            vb_id = simulation.plan.vb_of(subject.key)
        if vb_id is not None and vb_id >= simulation.plan.partitions:
            vb_id = None
        self._about = subject._replace(vb_id=vb_id)

    def text(self) -> str:
        """Return the page."""
        vb_id, key = self._about.vb_id, self._about.key
        parts = [self._wrong(), self._cluster(), self._faults(), self._moments()]
        if vb_id is not None:
            parts += [self._progress(vb_id), self._operations(vb_id, key), self._changes(vb_id)]
        parts += [self._nodes(), self._consumers(), self._again()]
        return "\n".join(line for part in parts for line in part)

    def _wrong(self) -> Iterator[str]:
        first = self._found[0]
        yield f"STORY OF SEED {self._simulation.seed}"
        yield ""
        yield f"What went wrong, at {_ms(self._now_ns)} ms"
        yield from _wrapped(f"{RULES.get(first.check, '')}".strip(), "  the rule:  ")
        for violation in dict.fromkeys(each.text for each in self._found[:3]):
            if first.check == CRASH:
                yield from (f"  {line}" for line in violation.rstrip().splitlines()[-12:])
            else:
                yield from _wrapped(violation, "  what was:  ")

    def _cluster(self) -> Iterator[str]:
        plan = self._simulation.plan
        yield ""
        yield "Who is who"
        stage = self._simulation
        of_all = [stage.machines, stage.clients, stage.consumers]
        nodes, clients, consumers = (", ".join(each.name for each in some) for some in of_all)
        copies = f", each with copies on {plan.copies} of them" if plan.nodes > 1 else ""
        yield from _wrapped(
            f"nodes: {nodes}; partitions: vb 0 to {plan.partitions - 1}{copies}; clients:"
            f" {clients}; consumers: {consumers}."
            + f" A write needs min_in_sync={plan.min_in_sync}, and is answered when"
            f" {_ANSWERED[plan.acknowledge]}." * (plan.nodes > 1),
            "  ",
        )
        if plan.nodes > 1:
            yield from _wrapped(_WORDS, "  ")
            yield from _wrapped(_DUTIES, "  ")

    def _faults(self) -> Iterator[str]:
        told = self._simulation.faults.told
        yield ""
        yield f"Faults until then: {len(told) or 'none'}"
        yield from _shown(told, FAULTS_SHOWN, self._fault)

    def _fault(self, fault: FaultTold) -> str:
        ended = "lasts" if fault.ended_ns is None else _ms(fault.ended_ns)
        whom = f" {fault.victims}:" if fault.victims else ""
        what = what_it_does(fault.name)
        return f"  {_ms(fault.began_ns):>10} to {ended:>10}  {fault.name}:{whom} {what}"

    def _moments(self) -> Iterator[str]:
        vb_id = self._about.vb_id
        moments = [
            each
            for each in self._simulation.world.moments
            if each.kind not in UNTOLD and (vb_id is None or each.vb_id in {None, vb_id})
        ] + self._of_consumers(vb_id)
        moments.sort(key=lambda each: each.at_ns)
        yield ""
        of = "" if vb_id is None else f" to vb {vb_id} and to the nodes"
        yield f"What happened{of} (ms, who, what)"
        yield from _shown(moments, MOMENTS_SHOWN, self._moment)

    def _moment(self, each: Moment) -> str:
        text = f"  {_ms(each.at_ns):>10}  {each.who:8} {each.kind}: {each.text}"
        if each.kind != "in-sync set grows":
            return text
        last = {
            step.node: step.synced_seqno
            for step in self._steps
            if step.vb_id == each.vb_id and step.at_ns <= each.at_ns
        }
        said = ", ".join(f"{name} {seqno}" for name, seqno in sorted(last.items()))
        return f"{text} (on disk then: {said})"

    def _of_consumers(self, vb_id: int | None) -> list[Moment]:
        facts = self._simulation.facts
        moments = [
            Moment(each.at_ns, "rollback", each.consumer, each.vb_id,
                   f"is told to roll back from {each.from_seqno} to {each.to_seqno}")
            for each in facts.rolled_back
        ] + [
            Moment(each.at_ns, "cut", "history", each.vb_id,
                   f"may lose what is above {each.to_seqno}: {each.kind}")
            for each in facts.excuses
        ] + [
            Moment(each.at_ns, "discard file", each.node, each.cut.vb_id,
                   f"keeps {len(each.cut.entries)} changes in a discard file, then cuts them off")
            for each in facts.cut_off
        ]  # fmt: skip
        return [each for each in moments if vb_id is None or each.vb_id == vb_id]

    def _progress(self, vb_id: int) -> Iterator[str]:
        steps = [step for step in self._steps if step.vb_id == vb_id]
        yield ""
        yield f"How far each node had come in vb {vb_id}: changes that it has / on disk / committed"
        machines = [machine.name for machine in self._simulation.machines]
        yield f"  {'ms':>10}{''.join(f'  {name:22}' for name in machines)}".rstrip()
        rows: list[tuple[int, dict[str, Step]]] = []
        for step in steps:
            if not rows or rows[-1][0] != step.at_ns:
                rows.append((step.at_ns, {}))
            rows[-1][1][step.node] = step
        if len(rows) > STEPS_SHOWN:
            yield f"  ... {len(rows) - STEPS_SHOWN} before"
        for at_ns, of_nodes in rows[-STEPS_SHOWN:]:
            cells = (f"  {_step(of_nodes.get(name)):22}" for name in machines)
            yield f"  {_ms(at_ns):>10}{''.join(cells)}".rstrip()

    def _operations(self, vb_id: int, key: bytes | None) -> Iterator[str]:
        operations = [
            each
            for each in self._simulation.facts.operations
            if (each.vb_id == vb_id if key is None else each.key == key)
        ]
        yield ""
        yield f"What clients asked of {f'vb {vb_id}' if key is None else f'key {key!r}'}"
        if len(operations) > OPERATIONS_SHOWN:
            yield f"  ... {len(operations) - OPERATIONS_SHOWN} before"
        for operation in operations[-OPERATIONS_SHOWN:]:
            yield from _hanging(f"  {operation}")
            if tries := operation.tries:
                before = f"... {len(tries) - 3} tries; " if len(tries) > 3 else ""
                yield from _wrapped(
                    f"{before}{'; '.join(tries[-3:])}", " " * 8 + "was sent again: "
                )
                if operation.kind is not Kind.GET and "NOT_MY_VBUCKET" in " ".join(tries):
                    yield " " * 8 + "(NOT_MY_VBUCKET promises that nothing was done there)"

    def _changes(self, vb_id: int) -> Iterator[str]:
        held = {
            machine.name: _changes_of(machine.node, vb_id)
            for machine in self._simulation.machines
            if isinstance(machine.node, SingleNode)
        }
        seqnos = sorted({seqno for changes in held.values() for seqno in changes})
        if (middle := self._about.seqno) is not None and middle in seqnos:
            at = seqnos.index(middle)
            seqnos = seqnos[max(0, at - CHANGES_SHOWN // 2) : at + CHANGES_SHOWN // 2]
        seqnos = seqnos[-CHANGES_SHOWN:]
        if not seqnos:
            return
        yield ""
        yield f"Changes of vb {vb_id} as each node holds them now (key, value, CAS)"
        for seqno in seqnos:
            of_nodes: dict[str, list[str]] = {}
            for name, changes in held.items():
                of_nodes.setdefault(changes.get(seqno, "-"), []).append(name)
            for change, who in of_nodes.items():
                differs = "" if len(of_nodes) == 1 else f"{', '.join(who)}: "
                yield f"  {seqno:6}  {differs}{change}"

    def _nodes(self) -> Iterator[str]:
        yield ""
        yield "Each node at that moment"
        vb_id = self._about.vb_id
        for machine in self._simulation.machines:
            yield from _node(machine, vb_id, self._simulation.plan.partitions)
        controls = self._simulation.controls
        if controls is not None and vb_id is not None:
            record = controls.record(vb_id)
            wanted = f", wanted master {_one(record.wanted_master)}" * bool(record.wanted_master)
            yield (
                f"  metadata store: vb {vb_id}, epoch {record.epoch}, master"
                f" {_one(record.master)}, in-sync set"
                f" {names(record.isr)}{wanted}"
            )

    def _consumers(self) -> Iterator[str]:
        vb_id = self._about.vb_id
        if vb_id is None:
            return
        for consumer in self._simulation.consumers:
            yield f"  consumer {consumer.name}: vb {vb_id} up to seqno {consumer.seqno(vb_id)}"

    def _again(self) -> Iterator[str]:
        yield ""
        yield "Each message of this run, decoded:"
        yield f"  {replay_command(self._simulation.seed, self._options)} --trace"


_ANSWERED: Final = {
    "committed": "every copy in sync has it on disk",
    "master": "the master has it on disk",
}
_WORDS: Final = (
    "Each partition has one master, which answers for it, and replicas that copy it. The in-sync"
    " set names the copies that have all that is committed: one of them becomes the next master."
    " An epoch is the reign of one master. A version is one line of history: it has an id, and"
    " changes in it are numbered by seqno."
)
_DUTIES: Final = (
    "An election begins a new version; a handover goes on in the one before. A copy joins the"
    " in-sync set when it has on disk what its master had when the epoch began, and all that is"
    " committed. While a change of the set has no answer of the metadata store, all of the old and"
    " the new set count. A master answers"
    f" as long as every copy in sync has confirmed it within {CONFIRMATION_NS / SECOND:g} s; the"
    " next one waits until that is over."
)


def _one(member: str | None) -> str:
    return "nobody" if member is None else short(member)


def _ms(at_ns: int) -> str:
    return f"{at_ns / MS:.3f}"


def _wrapped(text: str, first: str) -> list[str]:
    return wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False,
    )  # fmt: skip


def _shown(items: list[Any], most: int, line: Callable[[Any], str]) -> Iterator[str]:
    """Yield the last lines of a part, and how many were before."""
    if len(items) > most:
        yield f"  ... {len(items) - most} before"
    for item in items[-most:]:
        yield from _hanging(line(item))


def _hanging(line: str) -> list[str]:
    return wrap(
        line, WIDTH, subsequent_indent=" " * 20, drop_whitespace=True, break_long_words=False,
        replace_whitespace=False,
    ) or [line]  # fmt: skip


def _step(step: Step | None) -> str:
    if step is None:
        return ""
    return f"{step.state.name.lower()} {step.high_seqno}/{step.synced_seqno}/{step.committed_seqno}"


def _changes_of(node: SingleNode, vb_id: int) -> dict[int, str]:
    with node._machine.env.as_written():
        return _changes_in(node, vb_id)


def _changes_in(node: SingleNode, vb_id: int) -> dict[int, str]:
    """Return seqno -> what a node holds there."""
    part = node.engine.partitions[vb_id]
    first = max(1, part.high_seqno - 200)
    try:
        entries = node.engine.versions.entries(part, first, part.high_seqno, 1 << 30)
    except StoreDamagedError as error:
        return {first: str(error)}
    return {seqno_of(entry): _change(entry) for entry in entries}


def _change(entry: bytes) -> str:
    what = "deleted" if is_deleted(entry) else repr(value_of(entry)[:24])
    return f"{key_of(entry)[1:]!r} {what} CAS {META.unpack_from(entry)[4]:x}"


def _node(machine: Machine, vb_id: int | None, partitions: int) -> Iterator[str]:
    node = machine.node
    if node is None:
        why = "its process does not run" if machine.host.has_power else "it has no power"
        yield f"  {machine.name}: {why}"
        return
    assert isinstance(node, SingleNode)
    stopped = ", and stands still" if machine.host.is_paused else ""
    full = ", with a full disk" if machine.disk.is_full else ""
    yield f"  {machine.name}: runs{stopped}{full}, life {machine.host.incarnation}"
    if vb_id is None:
        for each in range(partitions):
            yield from _wrapped(f"vb {each}: {_state(node.engine.partitions[each])}", " " * 6)
        return
    yield from _wrapped(f"vb {vb_id}: {_state(node.engine.partitions[vb_id])}", " " * 6)
    part = node.engine.partitions[vb_id]
    versions = ", ".join(f"{uuid:x} from {start}" for uuid, start in part.failover.pairs()[:4])
    yield f"      versions, newest first: {versions}"
    if isinstance(node, ClusterNode):
        yield from (line for text in _of_cluster(node, vb_id) for line in _wrapped(text, " " * 6))


def _state(part: Partition) -> str:
    text = (
        f"{part.state.name.lower()}, epoch {part.leader_epoch}, has {part.high_seqno}, on disk"
        f" {part.synced_seqno}, called committed {part.committed_seqno}"
    )
    if part.history_floor:
        text += f", compacted below {part.history_floor}, deletions purged to {part.purge_seqno}"
    if (window := part.incomplete_snapshot) is not None:
        text += f", within a snapshot from {window.start} to {window.end}"
    return text


def _of_cluster(node: ClusterNode, vb_id: int) -> Iterator[str]:
    """Say what a node of a cluster believes about a partition."""
    now_ns, core = node.clock.monotonic_ns(), node.core
    seen = node.session.view.partitions.get(vb_id)
    if seen is not None:
        record = seen.content.record
        yield (
            f"knows the record: epoch {record.epoch}, master"
            f" {_one(record.master)}, in-sync set {names(record.isr)}"
        )
    mastership = core.master.masterships.get(vb_id)
    if mastership is None:
        confirmed_ns = core.replica.last_confirmed_ns(vb_id)
        yield f"confirmed its master last {_ago(now_ns - confirmed_ns)}"
        return
    others = sorted(mastership.isr - {node.member})
    synced = ", ".join(f"{short(each)} to {mastership.match(each)}" for each in others)
    yield f"is master; counts as on disk elsewhere: {synced or 'nobody is needed'}"
    record = mastership.record
    if mastership.asked is not None:
        yield (
            f"has asked the store for the in-sync set {names(mastership.asked)} and has no answer:"
            " who leaves counts until then"
        )
    if not record.isr <= mastership.isr:
        yield (
            f"DOES NOT WAIT for {names(record.isr - mastership.isr)}, which its record has in the"
            " in-sync set"
        )
    asked = core.master.serving.confirmations(mastership)
    said = ", ".join(
        f"{short(each)} {_ago(now_ns - asked[each]) if each in asked else 'never'}"
        for each in others
    )
    if others:
        seconds = CONFIRMATION_NS / SECOND
        yield f"was confirmed as master by {said} (that counts for {seconds:g} s)"
    confirmed_ns = core.replica.last_confirmed_ns(vb_id)
    if record.handover is None and now_ns - confirmed_ns < PROMOTED_WAIT_NS:
        yield (
            f"confirmed another master last {_ago(now_ns - confirmed_ns)}, or has started since: it"
            f" must not answer for {_ms(confirmed_ns + PROMOTED_WAIT_NS - now_ns)} ms more"
        )
    until_ns = mastership.confirmed_until_ns(asked)
    service = mastership.service(now_ns, until_ns)
    if service is not None:
        yield f"so it {_SERVICE[service.name]}"
        return
    fence, missing = core.master.serving.fence_of(mastership, now_ns)
    who = f" ({names(missing)})" if missing else ""
    yield f"so by the rules IT MUST NOT ANSWER: {fence}{who}"


def _ago(passed_ns: int) -> str:
    return f"{_ms(passed_ns)} ms ago"


_SERVICE: Final = {
    "PREPARING": "prepares, and answers nothing", "REPLAYING": "waits, and answers nothing",
    "SERVING": "answers", "HANDING": "hands over, and answers reads",
}  # fmt: skip
