"""Scenarios in which history branches, or a consumer's place in it is gone."""

from __future__ import annotations

import time

from clients.conformance.consumers.proxy import Hold
from clients.conformance.consumers.scenario import scenario
from clients.conformance.consumers.stage import Stage
from clients.conformance.packet import DELETION, MUTATION

GROUP = "rollback"
OTHER_VB = 93


@scenario(GROUP, "the newest changes of a partition are undone while the consumer reads it")
def rollback_to_the_middle(stage: Stage) -> None:
    """The stream ends with reason 6 (rollback) or 2 (state changed). Asked again from its position,
    the server answers ROLLBACK with a seqno. A consumer undoes what it has above that seqno, and
    asks again from a place at or below it, with the version that it had there.
    """
    stage.begin(10)
    stage.branch(5)
    stage.until_same()
    stage.write(2, first=20)
    stage.until_same()


@scenario(GROUP, "changes are undone while the consumer is away")
def rollback_while_away(stage: Stage) -> None:
    """The consumer learns of the branch only when it asks with its saved position. It must save the
    version with the position, and undo what it has stored, not only what it has in memory.
    """
    stage.begin(10)
    stage.consumer.kill()
    stage.branch(4)
    stage.write(3, first=20)
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "all changes of a partition are undone")
def rollback_to_zero(stage: Stage) -> None:
    """The answer is ROLLBACK to 0: nothing that the consumer has of this partition is valid. It
    empties the partition, and asks from 0. Documents that do not come again must go.
    """
    stage.begin(8)
    stage.branch(0)
    stage.write(2, first=20)
    stage.until_same()


@scenario(GROUP, "two branches, the second one below the first")
def rollback_twice(stage: Stage) -> None:
    """The consumer goes back twice. After the first time its own history is that of two versions,
    and both count when it asks again.
    """
    stage.begin(12)
    stage.branch(8)
    stage.write(3, first=20)
    stage.until_same()
    stage.branch(3)
    stage.until_same()
    stage.write(1, first=30)
    stage.until_same()


@scenario(GROUP, "two branches while the consumer is away, with changes between them")
def rollback_twice_while_away(stage: Stage) -> None:
    """The consumer has never seen the version between. A server that gets one version can answer
    with a second ROLLBACK. A consumer goes on until it gets OK.
    """
    stage.begin(12)
    stage.consumer.kill()
    stage.branch(8)
    stage.write(6, first=20)
    stage.branch(10)
    stage.write(1, first=40)
    stage.branch(6)
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "history branches while the connection is cut")
def rollback_while_reconnecting(stage: Stage) -> None:
    """No STREAM_END says it: the connection breaks, and is refused for a while. The first answer to
    the new stream request is the ROLLBACK.
    """
    stage.begin(10)
    stage.proxy.refuses = True
    stage.proxy.cut()
    stage.branch(5)
    stage.write(2, first=20)
    time.sleep(0.3)
    stage.proxy.refuses = False
    stage.until_same()


@scenario(GROUP, "the new history is longer than the old one")
def new_history_passes_the_old(stage: Stage) -> None:
    """After the rollback the server sends other changes with the seqnos that the consumer has seen
    before. A consumer that ignores seqnos at or below its old position loses them.
    """
    stage.begin(10)
    stage.consumer.kill()
    stage.branch(4)
    stage.write(12, first=20)
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "the new history passes the old one under the consumer's eyes")
def new_history_is_live(stage: Stage) -> None:
    """As `new-history-passes-the-old`, but the consumer stays: what it remembers of seqnos in
    memory has to go back, too.
    """
    stage.begin(10)
    stage.branch(4)
    stage.write(12, first=20)
    stage.until_same()


@scenario(GROUP, "history branches inside a snapshot of which the consumer has a part")
def rollback_inside_a_snapshot(stage: Stage) -> None:
    """A snapshot leaves out versions that it replaces later: key 0 has seqnos 1 and 3, and the
    snapshot has 2 and 3 only. The consumer stops after 2, and the server branches there. So the
    consumer lacks seqno 1, which is the newest version of key 0 now. Only its snapshot bounds tell
    the server: a position inside a snapshot is saved with them, never as a snapshot of its own.
    """
    stage.set(stage.key(0))
    stage.set(stage.key(1))
    stage.set(stage.key(0))
    hold = Hold(MUTATION, stage.vb_id, after=1)
    stage.proxy.add(hold)
    stage.consumer.start()
    stage.until("the consumer is inside the snapshot", hold.holds.is_set)
    time.sleep(0.5)
    stage.consumer.kill()
    hold.let_go()
    stage.branch(2)
    stage.set(stage.key(9))
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "a deletion is undone")
def deletion_is_undone(stage: Stage) -> None:
    """The document is there again, and the server does not send it: its seqno is below the branch.
    A consumer that deletes needs the value that it had, or begins the partition again.
    """
    stage.begin(5)
    stage.delete(stage.key(2))
    stage.set(stage.key(3))
    stage.until_same()
    stage.branch(5)
    stage.until_same()


@scenario(GROUP, "sixty partitions branch together")
def many_partitions_roll_back(stage: Stage) -> None:
    """A node's death takes many partitions back at once. Each has its own answer."""
    partitions = range(100, 160)
    stage.consumer.start()
    for vb_id in partitions:
        stage.write(4, vb_id=vb_id)
    stage.until_same()
    before = stage.wanted()
    stage.server.ask("POST", "/api/v1/vbuckets/branch", {"vbs": list(partitions), "at": 2})
    stage.note_undone(before)
    for vb_id in partitions:
        stage.write(1, first=9, vb_id=vb_id)
    stage.until_same()


@scenario(GROUP, "the server comes back with an older copy of its data")
def checkpoint_ahead_of_the_server(stage: Stage) -> None:
    """The consumer's version is known, but its seqno is above the server's. The answer is ROLLBACK
    or ERANGE. ERANGE names no seqno: begin again at 0, or at the version's last seqno in the
    failover log.
    """
    stage.write(6)
    copy = stage.copy_of_server()
    stage.consumer.start()
    stage.write(6, first=10)
    stage.until_same()
    stage.consumer.kill()
    before = stage.wanted()
    stage.replace_server(copy)
    stage.note_undone(before)
    stage.consumer.start()
    stage.until_same()
    stage.write(2, first=30)
    stage.until_same()


@scenario(GROUP, "another server has the address")
def unknown_version(stage: Stage) -> None:
    """The failover log knows none of the consumer's versions, so it goes back to 0. What it has of
    the other server must go, also in partitions that are empty here.
    """
    stage.consumer.start()
    stage.write(6)
    stage.write(3, vb_id=OTHER_VB)
    stage.until_same()
    stage.consumer.kill()
    before = stage.wanted()
    stage.replace_server(None)
    stage.note_undone(before)
    stage.write(2, first=20)
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "the partition has 40 versions more when the consumer comes back")
def more_than_25_versions(stage: Stage) -> None:
    """kv_engine shows 25 versions, and other servers keep more. A version that the server still
    knows costs no rollback; one that it has dropped means ROLLBACK to 0.
    """
    stage.begin(6)
    stage.consumer.kill()
    for _ in range(40):
        stage.server.failover(stage.vb_id)
    stage.write(2, first=20)
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "all versions that the consumer knows are gone from the failover log")
def versions_are_forgotten(stage: Stage) -> None:
    """The server keeps 200 versions. The answer is ROLLBACK to 0 although nothing was undone."""
    stage.begin(6)
    stage.consumer.kill()
    for _ in range(205):
        stage.server.failover(stage.vb_id)
    stage.write(2, first=20)
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "deletions are purged while the consumer is away")
def purge_passes_the_consumer(stage: Stage) -> None:
    """The consumer never hears of the deletions. The server sends it back to 0, and what does not
    come again has to go. Going through the stream from 0 alone does not remove it.
    """
    stage.begin(8)
    stage.consumer.kill()
    stage.delete(stage.key(1))
    stage.delete(stage.key(2))
    stage.write(3, first=20)
    stage.server.purge(stage.vb_id)
    stage.server.compact([stage.vb_id])
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "deletions are purged while the consumer stands still")
def purge_passes_a_paused_consumer(stage: Stage) -> None:
    """As `purge-passes-the-consumer`, but the process is only paused, and its connection is cut."""
    stage.begin(8)
    stage.consumer.pause()
    stage.proxy.cut()
    stage.delete(stage.key(1))
    stage.write(3, first=20)
    stage.server.purge(stage.vb_id)
    stage.server.compact([stage.vb_id])
    stage.consumer.resume()
    stage.until_same()


@scenario(GROUP, "a failover that loses nothing")
def failover_without_loss(stage: Stage) -> None:
    """The stream ends with reason 2 (state changed), and there is a new version. Nothing is rolled
    back: the consumer goes on from where it was.
    """
    stage.begin(6)
    stage.server.failover(stage.vb_id)
    stage.write(3, first=20)
    stage.until_same()


@scenario(GROUP, "a failover to a copy that was three changes behind")
def failover_with_loss(stage: Stage) -> None:
    """The stream ends with reason 2, not with 6: only the answer to the next request tells that
    changes are lost.
    """
    stage.begin(9)
    before = stage.wanted()
    stage.server.failover(stage.vb_id, lose=3)
    stage.note_undone(before)
    stage.write(1, first=20)
    stage.until_same()


@scenario(GROUP, "a branch comes while deletions are on their way")
def rollback_of_a_deletion_on_its_way(stage: Stage) -> None:
    """The consumer gets a snapshot's marker, but not its deletion, before the branch undoes it."""
    stage.begin(6)
    hold = Hold(DELETION)
    stage.proxy.add(hold)
    stage.delete(stage.key(4))
    stage.until("the deletion is on its way", hold.holds.is_set)
    stage.branch(6)
    hold.let_go()
    stage.until_same()
    stage.write(2, first=20)
    stage.until_same()
