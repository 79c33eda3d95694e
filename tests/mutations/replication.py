"""The mutations of replication; see mutations.table."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

REPLICATION = (
    # -- replication ---------------------------------------------------------------------------
    Mutation(
        "groups-of-handovers-without-a-rest",
        "now_ns + min(now_ns - self._began_ns, GROUP_REST_NS_MAX)\n",
        "now_ns\n",
        ("test_handover",),
    ),
    Mutation(
        "stale-acknowledgement-counts",
        "        if given is None or given.epoch != epoch:\n",
        "        if given is None:\n",
        ("test_isr",),
    ),
    Mutation(
        "shrink-counts-at-once",
        "    return confirmed | parting if asked is None else confirmed | asked | parting\n",
        "    return confirmed | parting if asked is None else asked | parting\n",
        ("test_isr", "test_modelcheck"),
    ),
    Mutation(
        "joins-below-the-epoch-start",
        "        and given.synced_seqno >= max(hw_seqno, epoch_start_seqno)\n",
        "        and given.synced_seqno >= hw_seqno\n",
        ("test_isr", "test_modelcheck"),
    ),
    Mutation(
        "promoted-replica-does-not-wait",
        "    return last_confirmed_ns + (0 if was_handed_over else PROMOTED_WAIT_NS)\n",
        "    return last_confirmed_ns\n",
        ("test_isr",),
    ),
    Mutation(
        "handover-unchecked",
        "    return handover is not None and handover == (log.current.vb_uuid, end_seqno)\n",
        "    return handover is not None\n",
        ("test_promotion",),
    ),
    Mutation(
        "restarted-process-is-master",
        "    return record.master == member and record.epoch > first_seen_epoch\n",
        "    return record.master == member\n",
        ("test_replication_record",),
    ),
    Mutation(
        "one-witness-of-two",
        "    return len(members) + is_lease_over >= majority(len(record.isr))\n",
        "    return len(members) + is_lease_over >= majority(len(record.isr) - 1)\n",
        ("test_election",),
    ),
    Mutation(
        "longer-log-of-an-older-version",
        "            report.version_epoch,\n            report.end_seqno,\n",
        "            report.end_seqno,\n",
        ("test_election",),
    ),
    Mutation(
        "unclean-election-forgotten",
        "        unclean_epoch=epoch,\n",
        "",
        ("test_replication_record", "test_promotion"),
    ),
    Mutation(
        "frame-satisfied-by-a-minority",
        "    return max(state.min_in_sync, majority(state.counted_copies))\n",
        "    return state.min_in_sync\n",
        ("test_write_answer",),
    ),
    # -- links between nodes -------------------------------------------------------------------
    Mutation(
        "acknowledgement-of-a-closed-stream",
        "                if self.streams.progress.get(each.vb_id) is progress:\n",
        "                if each.vb_id in self.streams.progress:\n",
        ("test_feed", "test_copies"),
    ),
    Mutation(
        "section-of-a-left-stream",
        "            if stream is None or stream.opaque != section.opaque:\n",
        "            if stream is None:\n",
        ("test_link", "test_copies"),
    ),
    Mutation(
        "closed-link-forgets-its-master",
        "            self.problem = problem\n        self._waiting.clear()\n",
        "            self.problem = problem\n        self._waiting.clear()\n"
        "        self._streams.clear()\n",
        ("test_copies", "test_link"),
    ),
    Mutation(
        "unsynced-message-acknowledged",
        "            unsynced.append((group, number))\n        else:\n",
        "            self.synced_number = number\n        else:\n",
        ("test_link", "test_copies"),
    ),
    Mutation(
        "floor-missed-while-behind",
        "        if self.window is None and self.floors != floors:\n",
        "        if self.window is None and self.floors > floors:\n",
        ("test_feed", "test_snapshot_below_floor"),
    ),
    Mutation(
        "snapshot-part-joins",
        "progress.snapshot_number > self._acknowledged_number\n",
        "False\n",
        ("test_snapshot_below_floor",),
    ),
    Mutation(
        "snapshot-hides-gaps",
        "    goes_on = control.start == window.start and (control.end",
        "    goes_on = control.start in {window.start, high_seqno} and (control.end",
        ("test_snapshot_below_floor",),
    ),
    Mutation(
        "known-deletion-is-not-brought",
        "or known_seqno > asked.purge or is_gone(collection_of(key)):\n",
        "or known_seqno > seqno or is_gone(collection_of(key)):\n",
        ("test_purged_replicas",),
    ),
    Mutation(
        "replica-keeps-purged-documents",
        "            lost.append(document)\n    if lost:\n",
        "            pass\n    if lost:\n",
        ("test_purged_replicas",),
    ),
    Mutation(
        "part-with-deletions-to-come-has-an-end",
        "            window = window._replace(end=UNENDED)\n",
        "            pass\n",
        ("test_purged_replicas",),
    ),
    Mutation(
        "deletion-below-a-later-version-is-not-brought",
        "before = versions.first_changes_after(part, part.history_floor)\n    keys",
        "before: dict[bytes, int] = {}\n    keys",
        ("test_purged_replicas",),
    ),
    Mutation(
        "purge-meanwhile-is-not-told-again",
        "if asked is not None and is_of_now(part, asked):\n",
        "if asked is not None:\n",
        ("test_purged_replicas",),
    ),
    Mutation(
        "remaining-of-now-not-of-the-floor",
        "    seqnos.update(before.values())\n    kept = ",
        "    kept = ",
        ("test_purged_replicas",),
    ),
    Mutation(
        "replica-presumes-documents",
        "            keyspace.apply(part, key, entry, seqno, is_document - was_document)\n",
        "            keyspace.apply(part, key, entry, seqno, int(is_document))\n",
        ("test_apply_paths", "test_copies"),
    ),
    # -- whole groups ----------------------------------------------------------------------------
    Mutation(
        "group-taken-by-a-later-stream",
        "        if opened < self._newest_open:\n",
        "        if False:\n",
        ("test_groups",),
    ),
    Mutation(
        "group-counts-for-streams-opened-since",
        "if progress is not None and progress.opened_number < number:\n",
        "if progress is not None:\n",
        ("test_groups",),
    ),
    Mutation(
        "group-commits-without-who-joined",
        "            if group.revision != self.revision:\n",
        "            if False:\n",
        ("test_groups",),
    ),
    Mutation(
        "committed-group-of-an-earlier-stream",
        "            if left != self._left:\n",
        "            if False:\n",
        ("test_groups",),
    ),
    Mutation(
        "uncommitted-group-told",
        "        first, last = first_run(self._committed, self._open.values(), self._given_up)\n",
        "        first, last = first_run(self._committed, (), self._given_up)\n",
        ("test_groups",),
    ),
    Mutation(
        "left-behind-and-still-in-step",
        "        self.replicating.discard(vb_id)\n        self._all_replicating = None\n",
        "        self.replicating.discard(vb_id)\n",
        ("test_groups",),
    ),
    Mutation(
        "unsynced-group-counts-for-who-is-left-alone",
        "            synced_seqno = min(synced_seqno, max(welcome.seqno, begin))\n",
        "            pass\n",
        ("test_commit",),
    ),
    Mutation(
        "newest-group-of-a-link-forgotten",
        "            self._senders.link_gone(member, link.newest_group)\n",
        "",
        ("test_commit",),
    ),
    Mutation(
        "stream-opened-amid-a-group-misses-it",
        "            progress.become_probe(progress.next)\n",
        "",
        ("test_commit",),
    ),
    Mutation(
        "group-that-fell-apart-sent-wholly",
        "(begun is None or not group.excluded)",
        "True",
        ("test_commit",),
    ),
    Mutation(
        "branch-below-a-floor",
        "                mastership.check_branch(wanted_branch.seqno)\n",
        "                pass\n",
        ("test_master",),
    ),
    Mutation(
        "floor-above-a-wanted-branch",
        "            pins.add(branch.seqno)\n",
        "            pins.add(self.part.high_seqno)\n",
        ("test_master",),
    ),
    # -- replication of a node -----------------------------------------------------------------
    Mutation(
        "replica-let-in-before-the-version-is-on-disk",
        "        if not mastership.is_ready:\n            return None\n        question",
        "        question",
        ("test_master",),
    ),
    Mutation(
        "who-joins-counts-late",
        "        mastership.ask(record.isr)\n",
        "        mastership.ask(None)\n",
        ("test_master",),
    ),
    Mutation(
        "silent-replica-is-level",
        "        self._note_caught_up(heard_ns)\n",
        "        self._note_caught_up(dict.fromkeys(heard_ns, now_ns))\n",
        ("test_mastership",),
    ),
    Mutation(
        "master-serves-while-it-hands-over",
        "        if self.has_handed or not may_answer_reads(now_ns, until_ns):\n",
        "        if not may_answer_reads(now_ns, until_ns):\n",
        ("test_mastership", "test_master"),
    ),
    Mutation(
        "handed-over-before-all-is-committed",
        "        is_drained = _is_drained(part)\n        is_in_vain",
        "        is_drained = True\n        is_in_vain",
        ("test_master",),
    ),
    Mutation(
        "no-fence-before-a-batch",
        "        if fence_ns is not None and now_ns >= fence_ns:\n",
        "        if fence_ns is not None and now_ns > fence_ns:\n",
        ("test_master",),
    ),
    Mutation(
        "commits-while-a-cut-is-drawn",
        "            self._watermarks.held = set()\n",
        "            pass\n",
        ("test_cut_member",),
    ),
    Mutation(
        "cut-covers-what-has-moved",
        "    return is_served and drawn == now\n",
        "    return True\n",
        ("test_cut",),
    ),
    Mutation(
        "cut-before-all-sessions-are-there",
        "        if not at or len(at) < len(following):\n",
        "        if not at:\n",
        ("test_consumer_cuts",),
    ),
    Mutation(
        "restart-forgets-what-is-closed",
        "            keep_closed(engine, read_closed(data_dir))\n",
        "            read_closed(data_dir)\n",
        ("test_consumer_cuts",),
    ),
    Mutation(
        "cut-off-before-it-is-answered",
        "        self._shell.depose((vb_id,), why)\n"
        "        mastership = self.masterships.pop(vb_id)",
        "        mastership = self.masterships.pop(vb_id)",
        ("test_master", "test_node"),
    ),
    Mutation(
        "cut-off-before-it-is-kept",
        "        if discard.kept_seqno < part.high_seqno:\n            return False\n",
        "",
        ("test_replica",),
    ),
    Mutation(
        "told-watermark-outlives-a-truncation",
        "            self._seqnos[vb_id] = min(self._seqnos[vb_id], seqno)\n",
        "            pass\n",
        ("test_replica",),
    ),
    Mutation(
        "confirmation-forgotten-with-the-link",
        "            self.confirmations.note(vb_id, link.confirmed_ns)\n"
        "            link.leave(vb_id)\n",
        "            link.leave(vb_id)\n",
        ("test_replica",),
    ),
    Mutation(
        "store-that-was-set-back-is-followed",
        "        if record.epoch < seen_epoch or not is_newest:\n",
        "        if record.epoch < 0:\n",
        ("test_node",),
    ),
    Mutation(
        "unreadable-record-is-written",
        "            if vb_id not in self._distrusted and vb_id not in older\n",
        "            if vb_id not in older\n",
        ("test_node",),
    ),
    Mutation(
        "unheard-replica-answers",
        "        if part.is_unheard:\n",
        "        if part.is_unheard and not part.has_copies:\n",
        ("test_session_fence", "test_node"),
    ),
    Mutation(
        "unheard-replica-keeps-its-streams",
        "            if part.is_unheard and not was_unheard:\n",
        "            if part.is_unheard and was_unheard is None:\n",
        ("test_node",),
    ),
    Mutation(
        "replica-of-a-stopped-process-answers",
        "        if now_ns >= self._unheard.next_ns:\n",
        "        if now_ns < self._unheard.next_ns:\n",
        ("test_node",),
    ),
    Mutation(
        "told-watermark-outlives-an-epoch",
        "        self._watermarks.announced.cap(part.vb_id, part.high_seqno)\n",
        "",
        ("test_replica",),
    ),
    Mutation(
        "member-in-sync-begins-at-0",
        "            if seqno and self._identity.member in self._record_of(vb_id).isr:\n",
        "            if not seqno and self._identity.member in self._record_of(vb_id).isr:\n",
        ("test_replica",),
    ),
    Mutation(
        "member-above-a-branch-is-elected",
        "part.incomplete_snapshot is None and not _is_branch_below(record, part),\n",
        "part.incomplete_snapshot is None,\n",
        ("test_replica",),
    ),
)
