"""What a node does as a replica: links, truncation, discards, the high watermark."""

from __future__ import annotations

from itertools import pairwise

from failover.coordinator.effects import Notice
from failover.replication.link import RETRY_NS, LinkState
from failover.replication.mastership import ReplicationSettings
from failover.replication.replica import BARRED_REDIAL_NS_MAX, REDIAL_NS, Discards
from failover.rules.isr import PROMOTED_WAIT_NS
from failover.rules.replication_record import elect, shrink, unclean_elect
from support.core_cluster import MS, VB, CoreCluster, Wire
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.engine.partition import VbState
from vbucket.model.entry import key_of, seqno_of
from vbucket.model.receipt import CutOff
from vbucket.store.records import BY_SEQNO_TABLE

UNHEARD_NS = ReplicationSettings().unheard_ns
LONG = PROMOTED_WAIT_NS + 200 * MS


def parted(settings: ReplicationSettings | None = None, *, unclean: bool = True) -> CoreCluster:
    """Return a cluster whose replica a has two changes that the new master b does not have."""
    cluster = CoreCluster(settings=settings)
    cluster.run(LONG)
    cluster.a.put(b"\0both")
    cluster.run(200 * MS)
    for wire in list(cluster.wires):
        wire.cut()
    cluster.wires.clear()
    if unclean:
        cluster.write(shrink(cluster.record, "b"), "a")
    for key in (b"\0one", b"\0two"):
        cluster.a.put(key)
    cluster.a.commit()
    cluster.a.told(CutOff)
    after = unclean_elect(cluster.record, "b") if unclean else elect(cluster.record, "b")
    cluster.write(after)
    return cluster


def reconcile(cluster: CoreCluster, ns: int = 600 * MS) -> None:
    for _ in range(ns // (50 * MS)):
        cluster.tick()
        cluster.settle()


# -- what is cut off -------------------------------------------------------------------------------


def test_nothing_is_cut_off_before_it_is_kept() -> None:
    cluster = parted()
    reconcile(cluster)
    (cut,) = cluster.a.told(CutOff)
    assert cluster.a.part.high_seqno == 3, "the shell has not answered"
    assert (cut.vb_id, cut.epoch, cut.first_seqno, cut.last_seqno) == (VB, 3, 2, 3)
    assert [key_of(entry) for entry in cut.entries] == [b"\0one", b"\0two"]
    assert cut.versions == tuple(cluster.a.part.failover.pairs())
    cluster.a.core.replica.kept(cut)
    reconcile(cluster)
    assert cluster.a.part.high_seqno == 1
    assert cluster.a.part.failover == cluster.b.part.failover
    assert cluster.a.told(CutOff) == [cut], "it is kept once"


def test_a_purge_cuts_off_what_the_master_has_without_a_file() -> None:
    cluster = parted()
    cluster.run(LONG)
    cluster.b.put(b"\0other")
    cluster.b.put(b"\0more")
    cluster.run(100 * MS)
    cluster.b.part.history_floor, cluster.b.part.purge_seqno = 3, 2
    reconcile(cluster)
    (cut,) = cluster.a.told(CutOff)
    assert (cut.first_seqno, cut.last_seqno) == (2, 3), "both have the first change"
    cluster.a.core.replica.kept(cut)
    reconcile(cluster)
    assert cluster.a.part.high_seqno == 3
    assert cluster.a.core.replica.rollbacks == 1, "it need not begin at 0"
    assert cluster.a.told(CutOff) == [cut]


def test_a_file_that_could_not_be_written_is_tried_again() -> None:
    cluster = parted()
    reconcile(cluster)
    (first,) = cluster.a.told(CutOff)
    cluster.a.core.replica.not_kept(first)
    reconcile(cluster, 2 * RETRY_NS + 100 * MS)
    first, second = cluster.a.told(CutOff)
    assert (first == second, first.file_name == second.file_name) == (True, True)
    assert cluster.a.part.high_seqno == 3
    cluster.a.core.replica.kept(first)
    reconcile(cluster)
    assert cluster.a.part.high_seqno == 3, "the answer is about a piece that was given up"
    cluster.a.core.replica.kept(second)
    reconcile(cluster)
    assert cluster.a.part.high_seqno == 1


def test_what_nobody_was_answered_needs_no_file() -> None:
    cluster = parted(unclean=False)
    reconcile(cluster)
    assert cluster.a.told(CutOff) == []
    assert cluster.a.part.high_seqno == 1


def test_master_that_answers_alone_always_keeps_what_it_cuts_off() -> None:
    settings = ReplicationSettings(min_in_sync=1, acknowledges_as_master=True)
    cluster = parted(settings, unclean=False)
    reconcile(cluster)
    (cut,) = cluster.a.told(CutOff)
    assert [seqno_of(entry) for entry in cut.entries] == [2, 3]
    assert cluster.a.part.high_seqno == 3


def test_much_goes_to_several_files() -> None:
    node = MemoryNode()
    part = node.engine.partitions[VB]
    for number in range(5):
        node.engine.store(SET, VB, b"\0k%d" % number, b"\0k%d" % number + bytes(100), 0, 0, 0, 0)
    node.commit()
    effects: list[CutOff] = []
    discards = Discards(node.engine, effects, piece_bytes_max=300)  # type: ignore[arg-type]
    found: list[int] = []
    while not discards.keep(part, 2, 1):
        piece = effects.pop()
        assert not discards.keep(part, 2, 1)
        assert effects == [], "one piece at a time"
        discards.kept(piece)
        found += [seqno_of(entry) for entry in piece.entries]
        assert len(piece.entries) <= 3
    assert found == [2, 3, 4, 5]


def test_what_was_kept_of_another_history_does_not_count() -> None:
    node = MemoryNode()
    part = node.engine.partitions[VB]
    effects: list[CutOff] = []
    discards = Discards(node.engine, effects)  # type: ignore[arg-type]
    node.engine.store(SET, VB, b"\0k", b"\0kv", 0, 0, 0, 0)
    assert not discards.keep(part, 2, 0)
    discards.kept(effects.pop())
    node.engine.store(SET, VB, b"\0more", b"\0morev", 0, 0, 0, 0)
    assert not discards.keep(part, 3, 0)
    assert [seqno_of(entry) for entry in effects.pop().entries] == [1, 2]


# -- damage ----------------------------------------------------------------------------------------


def damage(node: MemoryNode) -> None:
    """Bring a partition into the store, and change a byte of its only block."""
    node.merge()
    (block_key,) = [key for key in node.env.tables[BY_SEQNO_TABLE] if key[:2] == bytes([0, VB])]
    node.env.flip(BY_SEQNO_TABLE, block_key, len(node.env.tables[BY_SEQNO_TABLE][block_key]) - 3)
    node.store.refresh()


def test_replica_that_cannot_truncate_leaves_and_is_filled_anew() -> None:
    cluster = parted(unclean=False)
    damage(cluster.a)
    reconcile(cluster, 300 * MS)
    assert cluster.a.part.high_seqno == 3, "as long as it is in sync, it may be elected"
    (notice,) = cluster.a.told(Notice)
    assert "partition 1 cannot go back to seqno 1, as its master asks" in notice.text
    assert "when it has left the in-sync set" in notice.text
    assert cluster.refused == [], "other partitions go on"
    cluster.write(shrink(cluster.record, "a"))
    reconcile(cluster)
    assert cluster.a.part.failover == cluster.b.part.failover
    assert cluster.a.part.high_seqno == cluster.b.part.high_seqno == 1
    assert len(cluster.a.told(Notice)) == 2


def test_what_cannot_be_kept_is_not_cut_off() -> None:
    cluster = parted()
    damage(cluster.a)
    reconcile(cluster)
    assert cluster.a.part.high_seqno == 3
    (notice,) = cluster.a.told(Notice)
    assert "cannot be kept: it stays" in notice.text


def test_a_member_in_sync_does_not_begin_again_at_0() -> None:
    """Its history floor is above a branch: a floor that the former master told nobody of. At 0 it
    would lack what is committed, so it leaves the in-sync set first.
    """
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    for key in (b"\0one", b"\0two", b"\0three"):
        cluster.a.put(key)
    cluster.run(200 * MS)
    cluster.b.engine.keyspace.raise_floor(VB, 3, 0)
    cluster.a.core.master.want_branch(VB, 1, 99)
    cluster.run(300 * MS)
    assert (cluster.a.part.high_seqno, cluster.b.part.high_seqno) == (1, 3)
    assert cluster.record.isr == {"a", "b", "c"}
    for wire in list(cluster.wires):
        wire.cut()
    for _ in range(0, 2 * UNHEARD_NS, 100 * MS):
        cluster.tick("b", ns=100 * MS)
    (report,) = cluster.b.session.reported
    assert not report.is_electable
    cluster.run(2000 * MS)
    assert (cluster.record.isr, cluster.record.branch) == ({"a", "b", "c"}, None)
    assert cluster.b.part.failover == cluster.a.part.failover
    assert (cluster.b.part.high_seqno, cluster.b.part.history_floor) == (1, 0)


# -- the high watermark that was told --------------------------------------------------------------


def test_a_truncation_caps_what_was_told() -> None:
    cluster = parted(unclean=False)
    cluster.a.core.replica.committed({VB: 3}, is_synced=False)
    reconcile(cluster)
    assert cluster.a.part.high_seqno == 1
    assert cluster.a.core.watermarks.announced.seqno(VB) <= 1


def test_what_was_told_is_known_at_promotion_up_to_what_is_here() -> None:
    cluster = CoreCluster()
    cluster.run(LONG)
    cluster.a.put()
    cluster.run(200 * MS)
    cluster.b.core.replica.committed({VB: 40}, is_synced=False)
    cluster.write(elect(cluster.record, "b"), "b")
    assert cluster.b.mastership.known_seqno == 1
    assert cluster.b.core.watermarks.announced.seqno(VB) == 0, "it is not told a second time"


def test_what_was_told_of_changes_not_here_ends_with_the_epoch() -> None:
    """A branch or an unclean election replaces them, and the replica has nothing to cut off."""
    cluster = CoreCluster()
    cluster.run(LONG)
    cluster.a.put()
    cluster.run(200 * MS)
    cluster.b.core.replica.committed({VB: 40}, is_synced=False)
    cluster.write(elect(cluster.record, "a"))
    cluster.run(200 * MS)
    assert cluster.b.core.watermarks.announced.seqno(VB) <= cluster.a.part.committed_seqno == 1


# -- links -----------------------------------------------------------------------------------------


def test_another_folder_at_the_masters_address_is_not_the_master() -> None:
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    for wire in list(cluster.wires):
        wire.cut()
    cluster.wires.clear()
    for _ in range(0, UNHEARD_NS + 400 * MS, 50 * MS):
        cluster.tick("b")
        cluster.b.told(object)
        link = cluster.b.core.replica.links["a"]
        if link.state is not LinkState.CLOSED:
            wire = Wire(cluster.b, link, cluster.nodes["c"])
            while wire.is_open and wire.move():
                pass
            assert "the master's node refuses the link" in link.problem
    assert [item.vb_id for item in cluster.b.session.reported] == [VB]


def test_a_link_that_is_lost_is_dialled_again() -> None:
    cluster = CoreCluster()
    cluster.run(LONG)
    cluster.wires[0].cut()
    cluster.run(500 * MS)
    assert cluster.b.core.replica.links["a"].state is LinkState.READY
    cluster.a.put()
    cluster.run(200 * MS)
    assert cluster.b.part.committed_seqno == 1


def test_what_was_confirmed_is_not_forgotten_with_another_master() -> None:
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    following = cluster.b.core.replica
    confirmed_ns = following.last_confirmed_ns(VB)
    assert confirmed_ns > cluster.now_ns - 200 * MS
    cluster.write(elect(cluster.record, "c"), "b")
    assert following.last_confirmed_ns(VB) == confirmed_ns
    assert not following.links["a"].follows(VB)


def test_a_master_that_is_not_heard_is_reported() -> None:
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    for wire in list(cluster.wires):
        wire.cut()
    cluster.wires.clear()
    for _ in range(0, UNHEARD_NS // 2, 100 * MS):
        cluster.tick("b", ns=100 * MS)
    assert cluster.b.session.reported == (), "not yet"
    for _ in range(0, UNHEARD_NS, 100 * MS):
        cluster.tick("b", ns=100 * MS)
    (report,) = cluster.b.session.reported
    assert (report.vb_id, report.epoch, report.end_seqno) == (VB, 2, 0)
    assert (report.vb_uuid, report.version_epoch) == (cluster.a.part.vb_uuid, 2)
    cluster.run(500 * MS)
    assert cluster.b.session.reported == (), "it is heard again"
    assert cluster.a.part.state == VbState.ACTIVE


def test_a_node_that_did_not_run_suspects_nobody() -> None:
    """It could not hear the master meanwhile. What it has may be old all the same."""
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    for wire in list(cluster.wires):
        wire.cut()
    cluster.wires.clear()
    cluster.tick("b", ns=5_000 * MS)
    assert cluster.b.session.reported == ()
    assert cluster.b.part.is_unheard, "its copy may be 5 s old"
    for _ in range(0, UNHEARD_NS, 100 * MS):
        cluster.tick("b", ns=100 * MS)
    assert cluster.b.session.reported != (), "now it has listened for long enough"


def test_master_often_late_has_more_time_while_it_has_its_lease() -> None:
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    for _ in range(3):  # the node of the master runs every 500 ms
        for _ in range(5):
            cluster.tick("b", "c", ns=100 * MS)
        assert cluster.b.session.reported == ()
        cluster.run(50 * MS)
    for _ in range(10):
        cluster.tick("b", ns=100 * MS)
    assert cluster.b.part.is_unheard
    assert cluster.b.session.reported == (), "two silences like those before are nothing yet"
    cluster.b.session.view.alive.pop("a")
    cluster.tick("b", ns=100 * MS)
    assert cluster.b.session.reported != (), "the metadata store does not hear it, either"


def test_a_node_that_becomes_master_again_has_time_to_be_heard() -> None:
    """It restarted, or was a replica for long: that it said nothing is no sign of trouble."""
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    cluster.write(elect(cluster.record, "b"))
    cluster.run(2 * LONG)
    assert not cluster.a.core.replica.links["b"].problem
    cluster.write(elect(cluster.record, "c"))
    cluster.run(2 * LONG)  # nobody follows b
    for wire in [wire for wire in cluster.wires if wire.master is cluster.b]:
        wire.cut()
    cluster.run(2 * LONG)
    cluster.write(elect(cluster.record, "b"), "a", "c")
    cluster.tick("a", "c", ns=1)
    assert cluster.a.session.reported == () == cluster.nodes["c"].session.reported
    for _ in range(UNHEARD_NS // (50 * MS) + 1):  # b is never heard
        cluster.tick("a", "c")
    assert [item.vb_id for item in cluster.a.session.reported] == [VB]


def test_master_whose_connections_are_refused_is_reported() -> None:
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    for wire in list(cluster.wires):
        wire.cut()
    cluster.wires.clear()
    cluster.tick("b", ns=50 * MS)
    following = cluster.b.core.replica
    following.links["a"].unreachable("no connection to a: nobody listens", is_refused=True)
    cluster.tick("b", ns=50 * MS)
    assert [item.vb_id for item in cluster.b.session.reported] == [VB]
    cluster.run(500 * MS)
    assert cluster.b.session.reported == (), "it is heard again"


def test_a_master_that_does_not_answer_a_dial_is_only_silent() -> None:
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    for wire in list(cluster.wires):
        wire.cut()
    cluster.wires.clear()
    cluster.tick("b", ns=50 * MS)
    cluster.b.core.replica.links["a"].unreachable("no answer", is_refused=False)
    cluster.tick("b", ns=50 * MS)
    assert cluster.b.session.reported == ()


def test_a_node_not_let_in_waits_longer_before_each_attempt() -> None:
    cluster = CoreCluster("abc")
    cluster.run(LONG)
    for wire in list(cluster.wires):
        wire.cut()
    cluster.wires.clear()
    following = cluster.b.core.replica
    dialled_ns: list[int] = []
    link = following.links["a"]
    while len(dialled_ns) < 10:
        cluster.tick("b", ns=50 * MS)
        cluster.wires.clear()  # nobody but this test carries the dial out
        if following.links["a"] is not link:
            link = following.links["a"]
            dialled_ns.append(cluster.now_ns)
            link.refused("it does not let this node in")
    pauses_ns = [after - before for before, after in pairwise(dialled_ns)]
    assert pauses_ns == sorted(pauses_ns)
    assert pauses_ns[0] < 3 * REDIAL_NS
    assert pauses_ns[-1] in range(BARRED_REDIAL_NS_MAX, BARRED_REDIAL_NS_MAX + 100 * MS)
    cluster.run(BARRED_REDIAL_NS_MAX + LONG)
    assert following.is_followed(VB), "it is let in now"
    assert not following.redials.pauses_ns or not following.links["a"].is_barred


def test_a_new_link_takes_over_all_that_the_lost_one_followed() -> None:
    """Also if a record changes between the loss and the next tick, and asks for the new link."""
    cluster = CoreCluster()
    cluster.run(LONG)
    core, part = cluster.b.core, VB + 1
    core.records[part] = core.records[VB]
    core.replica.follow(part, cluster.record, cluster.now_ns)
    cluster.run(2 * LONG)
    cluster.wires.pop().cut()
    core.replica.follow(VB, cluster.record, cluster.now_ns)  # before a tick has seen the loss
    assert not core.replica.links["a"].follows(part)
    cluster.tick("b")
    assert core.replica.links["a"].follows(part)
