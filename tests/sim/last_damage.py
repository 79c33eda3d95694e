"""The last damage of a run, when nothing else is wrong: the node itself, or another copy, can prove
what was there. So it has to be mended in time.

A copy proves it if it gives all of the versions of the block, and did so all the time: in
clusters that move copies, one may be dropped meanwhile, and another one not be complete yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from failover.rules.repair import why_not_taken
from sim.facts import Damaged
from sim.faults import Stage
from sim.node import SingleNode
from sim.twin_pages import KINDS, PAGED, TwinEnv
from vbucket.model.entry import PREFIX_BYTES, prev_seqno_of
from vbucket.store.block import Block
from vbucket.store.records import BY_SEQNO_TABLE

_FLIP = KINDS[0]
"""What a node mends alone, wherever it is."""


def damage_once_more(stage: Stage) -> Damaged | None:
    """Damage a page that can be mended. None: the one that was drawn cannot."""
    world = stage.world
    machine = stage.machines[world.below(len(stage.machines))]
    node, env = machine.node, machine.env
    if not isinstance(node, SingleNode) or not isinstance(env, TwinEnv):
        return None
    table = PAGED[world.below(len(PAGED))]
    rows = env.tables[table]
    if not rows:
        return None
    key = rows.peekitem(world.below(len(rows)))[0]
    provers: frozenset[str] = frozenset()
    if table == BY_SEQNO_TABLE:
        provers = _provers(stage, node, key)
    is_given = table != BY_SEQNO_TABLE or provers
    kind = KINDS[world.below(len(KINDS))] if is_given else _FLIP
    page = Damaged(world.now_ns, machine.name, table, key, kind)
    page.must_mend = True
    if table == BY_SEQNO_TABLE and kind != _FLIP:
        page.provers = provers
    if not env.strike(world.draw, table, key, page):
        return None
    stage.facts.damaged.append(page)
    world.tell("page damaged", machine.name, str(page), page.vb_id)
    return page


def look_at(stage: Stage, page: Damaged) -> None:
    """Note which copies can still prove what was there. If none could all the time, nobody has to
    mend it in time.
    """
    if page.ended or page.provers is None:
        return
    node = next(each.node for each in stage.machines if each.name == page.node)
    if isinstance(node, SingleNode) and page.provers:
        page.provers &= _provers(stage, node, page.key)
        page.must_mend = bool(page.provers)


def _provers(stage: Stage, node: SingleNode, key: bytes) -> frozenset[str]:
    """Return the other nodes whose copies have the versions of a block, and may give them."""
    env = node._machine.env
    rows = env.tables[BY_SEQNO_TABLE]
    if stage.controls is None or key not in rows:
        return frozenset()
    block = Block(key, rows[key])
    at = rows.index(key) + 1
    behind = rows.peekitem(at)[0] if at < len(rows) else b""
    last = block.last_seqno
    if behind[:2] == key[:2] and int.from_bytes(behind[2:10], "big") - 1 > last:
        return frozenset()
    copies = stage.controls.record(block.vb_id).copies
    return frozenset(
        other.name
        for other in (machine.node for machine in stage.machines)
        if isinstance(other, SingleNode)
        and other is not node
        and any(member.startswith(f"{other.name}-") for member in copies)
        and _gives(other, node, block)
    )


def _gives(other: SingleNode, node: SingleNode, block: Block) -> bool:
    """Whether a copy has the versions of a block of another one, and may give them."""
    last = block.last_seqno
    part, theirs = (each.engine.partitions[block.vb_id] for each in (node, other))
    why = why_not_taken(
        part.failover, theirs.failover, last,
        own_committed=part.committed_seqno, committed=theirs.committed_seqno,
    )  # fmt: skip
    if why or theirs.incomplete_snapshot is not None:
        return False
    entries = other.engine.versions.entries(theirs, block.first_seqno, last, 1 << 20)
    return prove(entries, block.entries())


def prove(entries: Sequence[bytes], own: Sequence[bytes]) -> bool:
    """Whether versions of another copy tell all of a block's own ones. A copy does not know what
    those replaced that came in the snapshot which filled it.
    """
    if [entry[PREFIX_BYTES:] for entry in entries] != [entry[PREFIX_BYTES:] for entry in own]:
        return False
    links = [*map(prev_seqno_of, own)]
    differ = [
        at for at, entry in enumerate(entries) if prev_seqno_of(entry) != links[at]
    ]  # fmt: skip
    return not differ or not any(links[: differ[-1] + 1])
