"""The mutations: one faulty line of product code each, and the test files that shall find it.

A mutation names no file: its old text occurs exactly once in the product packages
(tests/test_mutations.py checks that), so code may move. Test files are named without their folder.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault: `old` becomes `new`. `tests`: names of test files, the likeliest first."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # -- partitions ----------------------------------------------------------------------------
    Mutation(
        "cas-not-compared",
        "    if mode == ADD or (cas and cas != old_cas):\n",
        "    if mode == ADD:\n",
        ("test_engine", "test_session_documents"),
    ),
    Mutation(
        "cas-stands-still",
        "            cas = part.max_cas + 1\n        seqno = part.high_seqno + 1\n",
        "            cas = part.max_cas\n        seqno = part.high_seqno + 1\n",
        ("test_engine", "test_engine_model"),
    ),
    Mutation(
        "expiry-one-second-late",
        "        if known.opcode == MUTATION and 0 < known.expiry <= self._now_s:\n",
        "        if known.opcode == MUTATION and 0 < known.expiry < self._now_s:\n",
        ("test_session_updates", "test_expiry"),
    ),
    Mutation(
        "rollback-keeps-one-change",
        "        del self.entries[self.position_of(seqno + 1) :]\n",
        "        del self.entries[self.position_of(seqno + 2) :]\n",
        ("test_engine", "test_lifecycle"),
    ),
    Mutation(
        "wrong-seqno-after-branch",
        "        self.high_seqno = seqno\n        if self.incomplete_snapshot",
        "        self.high_seqno = seqno + 1\n        if self.incomplete_snapshot",
        ("test_engine", "test_engine_model"),
    ),
    Mutation(
        "branch-keeps-answers-in-flight",
        "                group.high_seqnos[vb_id] = min(group.high_seqnos[vb_id], seqno)\n",
        "                group.high_seqnos[vb_id] = group.high_seqnos[vb_id]\n",
        ("test_engine", "test_commits", "test_engine_model"),
    ),
    Mutation(
        "floor-above-what-is-committed",
        "        limit = min(max(self.committed_seqno, known_seqno), self.high_seqno)\n",
        "        limit = self.high_seqno\n",
        ("test_lifecycle", "test_compaction_floors"),
    ),
    Mutation(
        "frozen-entries-lost-when-taken-back",
        "        frozen.entries += active.entries\n",
        "        pass\n",
        ("test_engine", "test_damaged_upkeep"),
    ),
    Mutation(
        "superseded-off-by-one",
        "                    if prev_seqno >= start_seqno:\n",
        "                    if prev_seqno > start_seqno:\n",
        ("test_stream_snapshots", "test_view", "test_engine_model"),
    ),
    # -- log, store, merge ---------------------------------------------------------------------
    Mutation(
        "log-checksum-missed",
        "    if _crc32c_extend(head_crc, data[payload_at:end]) != crc:\n",
        "    if _crc32c_extend(head_crc, data[payload_at:end]) != crc and not payload_at:\n",
        ("test_log",),
    ),
    Mutation(
        "log-end-mark-ignored",
        "    if found.group < mark.end.group:\n",
        "    if found.group < mark.end.group - 1:\n",
        ("test_log", "test_log_end", "test_power_loss"),
    ),
    Mutation(
        "block-checksum-missed",
        "        if _crc32c(frame) != self.frame_crcs[index]:\n",
        "        if _crc32c(frame) != self.frame_crcs[index] and index:\n",
        ("test_block", "test_store"),
    ),
    Mutation(
        "record-checksum-missed",
        "        if _crc32c(full_key + value[:-4]) == fields[7]:\n",
        "        if fields[7]:\n",
        ("test_key_record", "test_store"),
    ),
    Mutation(
        "merge-drops-tombstones",
        "        self._items = by_key_items(prefix, keys, entries)\n",
        "        rows = by_key_items(prefix, keys, entries)\n"
        "        self._items = [row for row in rows if row[1][0] == _MUTATION]\n",
        ("test_merge", "test_verify"),
    ),
    Mutation(
        "purge-seqno-not-raised",
        "                purge_seqno=max(stage.record.purge_seqno, purge),\n",
        "                purge_seqno=stage.record.purge_seqno,\n",
        ("test_merge", "test_compaction"),
    ),
    Mutation(
        "leader-epoch-not-merged",
        "            stage.record = stage.record._replace(epoch=epoch)\n",
        "            pass\n",
        ("test_merge", "test_leadership"),
    ),
    Mutation(
        "epoch-below-its-version-not-verified",
        "        if newest_below >= 0 and epoch < self._epochs[newest_below]:\n",
        "        if newest_below > len(self._epochs):\n",
        ("test_verify",),
    ),
    Mutation(
        "merge-takes-segments-out-of-order",
        "        if segment != merged_segment + 1:\n",
        "        if segment < merged_segment:\n",
        ("test_merge",),
    ),
    Mutation(
        "mark-slot-overwritten",
        "slot for slot in range(MARK_SLOTS) if slot not in {self._kept_slot, synced_slot}\n",
        "slot for slot in range(MARK_SLOTS) if slot not in {synced_slot}\n",
        ("test_log", "test_power_loss"),
    ),
    Mutation(
        "log-end-only-synced-again",
        "                self._device.rewrite(self._synced_bytes, unproven)\n",
        "                pass\n",
        ("test_log_rewrite", "test_power_loss"),
    ),
    Mutation(
        "end-mark-only-synced-again",
        "self._device.mark(self._mark.slot, pack_mark(self._mark.end, self._mark.sequence))\n",
        "pass\n",
        ("test_power_loss",),
    ),
    # -- failover ------------------------------------------------------------------------------
    Mutation(
        "rollback-one-too-low",
        "        return Decision(\n            common,\n",
        "        return Decision(\n            max(0, common - 1),\n",
        ("test_rollback",),
    ),
    Mutation(
        "version-at-the-branch-forgotten",
        "        return tuple(entry for entry in self.entries if entry.seqno <= seqno)\n",
        "        return tuple(entry for entry in self.entries if entry.seqno < seqno)\n",
        ("test_failover_history",),
    ),
    Mutation(
        "plain-clients-get-all-versions",
        "        return self.pairs()[:FAILOVER_ENTRIES_SHOWN]\n",
        "        return self.pairs()\n",
        ("test_failover_history", "test_session_versions"),
    ),
    Mutation(
        "purge-boundary-off-by-one",
        "    if 0 < start < purge and told_purge != purge:\n",
        "    if 0 < start < purge - 1 and told_purge != purge:\n",
        ("test_rollback",),
    ),
    # -- streams -------------------------------------------------------------------------------
    Mutation(
        "snapshot-marker-starts-at-the-end-before",
        "        stream.snap_start_seqno = end_seqno + 1\n",
        "        stream.snap_start_seqno = end_seqno\n",
        ("test_stream_snapshots",),
    ),
    Mutation(
        "streams-show-what-is-not-committed",
        "        limit, floor = min(part.committed_seqno, stream.end_seqno), part.history_floor\n",
        "        limit, floor = min(part.high_seqno, stream.end_seqno), part.history_floor\n",
        ("test_stream_snapshots", "test_stream_model"),
    ),
    Mutation(
        "acknowledgement-off-by-one",
        "        self.unacked_bytes = max(0, self.unacked_bytes - processed_bytes)\n",
        "        self.unacked_bytes = max(0, self.unacked_bytes - processed_bytes - 1)\n",
        ("test_stream_flow_control",),
    ),
    Mutation(
        "stream-end-forgets-flow-control",
        "        self._count(self.snapshots.put(stream, self._urgent, message))\n",
        "        self.snapshots.put(stream, self._urgent, message)\n",
        ("test_stream_flow_control", "test_stream_ends"),
    ),
    # -- sessions ------------------------------------------------------------------------------
    Mutation(
        "quiet-stores-answer",
        "        if opcode in _QUIET_CHANGES:\n            return\n        if extras is None and",
        "        if extras is None and",
        ("test_session_documents",),
    ),
    Mutation(
        "relative-expiry-taken-as-absolute",
        "    return expiry + now_s if 0 < expiry <= RELATIVE_EXPIRY_MAX_S else expiry\n",
        "    return expiry + now_s if 0 < expiry < RELATIVE_EXPIRY_MAX_S else expiry\n",
        ("test_session_updates",),
    ),
    Mutation(
        "get-does-not-wait-for-the-commit",
        "        if part.last_group > engine.commits.committed_group:\n"
        "            state.observes_version(part, key)\n"
        "        if entry is None:\n"
        "            if opcode not in _QUIET_READS:\n",
        "        if entry is None:\n            if opcode not in _QUIET_READS:\n",
        ("test_session_documents", "test_session_waits"),
    ),
    Mutation(
        "rollback-refused-as-from-zero",
        "            value = U64.pack(decision.rollback_seqno)\n",
        "            value = U64.pack(0)\n",
        ("test_session_dcp",),
    ),
    # -- server --------------------------------------------------------------------------------
    Mutation(
        "groups-not-synced",
        "        if job.is_synced:\n            self._sync()\n",
        "        if job.group.branched:\n            self._sync()\n",
        ("test_committer", "test_failing_sync", "test_node_durability"),
    ),
    Mutation(
        "branches-not-synced",
        "WriteGroup(group, self._syncs_groups or bool(group.branched), rotates)\n",
        "WriteGroup(group, self._syncs_groups, rotates)\n",
        ("test_committer", "test_node_durability"),
    ),
    Mutation(
        "answers-leave-before-the-commit",
        "        if batch.group <= commits.committed_group:\n",
        "        if batch.group - 1 <= commits.committed_group:\n",
        ("test_held_answers", "test_failing_sync", "test_connection"),
    ),
    Mutation(
        "answers-wait-for-one-partition-of-several",
        "        return all(is_committed(vb_id, group) for",
        "        return any(is_committed(vb_id, group) for",
        ("test_held_answers",),
    ),
    Mutation(
        "quiet-changes-forgotten",
        "                state.awaited[vb_id_of(entry)] = state.wait_group\n",
        "                pass\n",
        ("test_held_answers",),
    ),
    Mutation(
        "applied-change-to-be-sent-again",
        "        status = Status.ETMPFAIL if mark.is_read else AMBIGUOUS\n",
        "        status = Status.ETMPFAIL\n",
        ("test_answer_marks", "test_held_answers_model"),
    ),
    Mutation(
        "quiet-change-lost-without-a-word",
        "        if state.marks:\n            self.take(state, read_ns)\n",
        "        if state.marks and state.answers:\n            self.take(state, read_ns)\n",
        ("test_answer_marks",),
    ),
    Mutation(
        "durable-without-a-majority",
        "        return guard is None or is_done(guard.write_state(durability), seqno)\n",
        "        return True\n",
        ("test_write_guards", "test_held_answers_model"),
    ),
    Mutation(
        "durable-applied-unasked",
        "            if part.guard is not None and part.state == VbState.ACTIVE:\n",
        "            if part.guard is not None and part.holds:\n",
        ("test_write_guards",),
    ),
    Mutation(
        "half-a-packet-keeps-its-place",
        "        if self.first_change < 0 or not self.wait_group:\n",
        "        if self.first_change < 0:\n",
        ("test_write_guards",),
    ),
    Mutation(
        "fenced-is-elsewhere",
        "    return _COME_BACK if part.durable_state == VbState.ACTIVE else",
        "    return _COME_BACK if part.state == VbState.ACTIVE else",
        ("test_session_fence",),
    ),
    Mutation(
        "who-is-behind-sends-back",
        "            if not part.may_send_back:\n",
        "            if not part.may_send_back and part.holds:\n",
        ("test_session_fence",),
    ),
    Mutation(
        "commit-beyond-the-group",
        "            if number >= first and group.high_seqnos.get(vb_id, 0) > seqno:\n",
        "            if number > first and group.high_seqnos.get(vb_id, 0) > seqno:\n",
        ("test_commits",),
    ),
    # -- clients -------------------------------------------------------------------------------
    Mutation(
        "retry-status-dropped",
        "dict.fromkeys(TEMPORARY_STATUSES, Verdict.LATER)",
        "dict.fromkeys(TEMPORARY_STATUSES - {Status.ETMPFAIL}, Verdict.LATER)",
        ("test_consumer_core", "test_streaming"),
    ),
    Mutation(
        "checkpoint-counts-what-is-in-hand",
        "        return self._positions_after("
        "self._count - 1 if self._is_single else self._piece_start)\n",
        "        return self._positions_after(self._count)\n",
        ("test_consumer_reader", "test_consumer_stops", "test_consumer_save"),
    ),
    Mutation(
        "failover-log-not-taken",
        "        self.versions = versions\n        self.retry_ns = 0\n",
        "        self.retry_ns = 0\n",
        ("test_consumer_core",),
    ),
    Mutation(
        "acknowledged-before-processed",
        "        return at - uncounted\n",
        "        return at\n",
        ("test_consumer_core", "test_consumer_pair"),
    ),
    Mutation(
        "writes-sent-twice-after-a-lost-connection",
        "        return Reaction.LOST if opcode in READS or not was_sent else Reaction.END\n",
        "        return Reaction.LOST\n",
        ("test_kv",),
    ),
    # -- backup --------------------------------------------------------------------------------
    Mutation(
        "backup-checksum-missed",
        "or raw_bytes > RAW_BYTES_MAX or crc32c(packed) != checksum:\n",
        "or raw_bytes > RAW_BYTES_MAX:\n",
        ("test_backup_formats", "test_backup_damage"),
    ),
    Mutation(
        "folded-runs-lose-their-cuts",
        "    ranges = tuple((at, at) for at in sorted({0, *cuts, seqno}))\n",
        "    ranges = tuple((at, at) for at in sorted({0, seqno}))\n",
        ("test_backup_points", "test_backup_core"),
    ),
    Mutation(
        "backup-takes-seqnos-twice",
        "                if not last < seqno <= limit:\n",
        "                if not last <= seqno <= limit:\n",
        ("test_backup_intake",),
    ),
    # -- Spark ---------------------------------------------------------------------------------
    Mutation(
        "cut-one-too-high",
        '        cut[row["vb"]] = row["seqno_min"] - 1\n',
        '        cut[row["vb"]] = row["seqno_min"]\n',
        ("test_spark_sinks", "test_spark_power_loss"),
    ),
    Mutation(
        "common-seqno-of-the-server-alone",
        "    return min(seqno, known.common_seqno) if",
        "    return known.common_seqno if",
        ("test_rollback", "test_spark_plan", "test_spark_fetch_core"),
    ),
    Mutation(
        "spark-offset-loses-its-rollback",
        "        if entries[vb_id].seqno or entries[vb_id].rollback_to is not None\n",
        "        if entries[vb_id].seqno\n",
        ("test_spark_offset", "test_spark_plan"),
    ),
    # -- replication ---------------------------------------------------------------------------
    Mutation(
        "stale-acknowledgement-counts",
        "        if given is None or given.epoch != epoch:\n",
        "        if given is None:\n",
        ("test_isr",),
    ),
    Mutation(
        "shrink-counts-at-once",
        "    return confirmed if asked is None else confirmed | asked\n",
        "    return confirmed if asked is None else asked\n",
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
        "                if self._streams.get(each.vb_id) is stream:\n",
        "                if each.vb_id in self._streams:\n",
        ("test_replica_feed", "test_copies"),
    ),
    Mutation(
        "section-of-a-left-stream",
        "            if stream is None or stream.opaque != section.opaque:\n",
        "            if stream is None:\n",
        ("test_replica_link", "test_copies"),
    ),
    Mutation(
        "closed-link-forgets-its-master",
        "            self.problem = problem\n        self._waiting.clear()\n",
        "            self.problem = problem\n        self._waiting.clear()\n"
        "        self._streams.clear()\n",
        ("test_copies", "test_replica_link"),
    ),
    Mutation(
        "unsynced-message-acknowledged",
        "            unsynced.append((group, number))\n        else:\n",
        "            self._synced_number = number\n        else:\n",
        ("test_replica_link", "test_copies"),
    ),
    Mutation(
        "floor-missed-while-behind",
        "        elif self.floors != floors:\n",
        "        elif self.floors > floors:\n",
        ("test_replica_feed", "test_snapshot_below_floor"),
    ),
    Mutation(
        "snapshot-part-joins",
        "        return stream is not None and stream.whole_number > self._acknowledged_number\n",
        "        return False\n",
        ("test_snapshot_below_floor",),
    ),
    Mutation(
        "snapshot-hides-gaps",
        "    goes_on = told.start == window.start and told.end >= window.end\n",
        "    goes_on = told.start in {window.start, high_seqno} and told.end >= window.end\n",
        ("test_snapshot_below_floor",),
    ),
    Mutation(
        "replica-presumes-documents",
        "            keyspace.apply(part, key, entry, seqno, is_document - was_document)\n",
        "            keyspace.apply(part, key, entry, seqno, int(is_document))\n",
        ("test_apply_paths", "test_copies"),
    ),
    # -- replication of a node -----------------------------------------------------------------
    Mutation(
        "replica-let-in-before-the-version-is-on-disk",
        "        if not mastership.is_ready:\n            return FeedAnswer(",
        "        if not mastership:\n            return FeedAnswer(",
        ("test_leading",),
    ),
    Mutation(
        "who-joins-counts-late",
        "                mastership.asked = record.isr\n",
        "                mastership.asked = None\n",
        ("test_leading",),
    ),
    Mutation(
        "silent-replica-is-level",
        "max(self._level_ns.get(member, 0), heard_ns.get(member, 0))\n",
        "max(self._level_ns.get(member, 0), now_ns)\n",
        ("test_mastership",),
    ),
    Mutation(
        "master-serves-while-it-hands-over",
        "        if self.has_handed or not may_answer_reads(now_ns, until_ns):\n",
        "        if not may_answer_reads(now_ns, until_ns):\n",
        ("test_mastership", "test_leading"),
    ),
    Mutation(
        "handed-over-before-all-is-committed",
        "        if part.committed_seqno < part.high_seqno:\n            return None\n",
        "",
        ("test_leading",),
    ),
    Mutation(
        "no-fence-before-a-batch",
        "        if fence_ns is not None and now_ns >= fence_ns:\n",
        "        if fence_ns is not None and now_ns > fence_ns:\n",
        ("test_leading",),
    ),
    Mutation(
        "cut-off-before-it-is-answered",
        "        self._depose((vb_id,), why)\n        part, wanted",
        "        part, wanted",
        ("test_leading", "test_node_core"),
    ),
    Mutation(
        "cut-off-before-it-is-kept",
        "        if keeping.kept_seqno < part.high_seqno:\n            return False\n",
        "",
        ("test_following",),
    ),
    Mutation(
        "confirmation-forgotten-with-the-link",
        "            self.confirmed(vb_id, link.confirmed_ns)\n            link.leave(vb_id)\n",
        "            link.leave(vb_id)\n",
        ("test_following",),
    ),
    Mutation(
        "store-that-was-set-back-is-followed",
        "        if record.epoch < seen_epoch:\n            self._distrust(",
        "        if record.epoch < 0:\n            self._distrust(",
        ("test_node_core",),
    ),
    Mutation(
        "unreadable-record-is-written",
        "            if vb_id not in self._distrusted\n",
        "            if vb_id in self._records\n",
        ("test_node_core",),
    ),
    Mutation(
        "unheard-replica-answers",
        "        if part.is_unheard:\n",
        "        if part.is_unheard and not part.has_copies:\n",
        ("test_session_fence", "test_node_core"),
    ),
    Mutation(
        "unheard-replica-keeps-its-streams",
        "            if part.is_unheard and not was_unheard:\n",
        "            if part.is_unheard and was_unheard is None:\n",
        ("test_node_core",),
    ),
    Mutation(
        "replica-of-a-stopped-process-answers",
        "        if now_ns >= self._unheard_from_ns:\n",
        "        if now_ns < self._unheard_from_ns:\n",
        ("test_node_core",),
    ),
    Mutation(
        "told-watermark-outlives-an-epoch",
        "        self._hw[vb_id] = min(self._hw.get(vb_id, 0), part.high_seqno)\n",
        "",
        ("test_following",),
    ),
    Mutation(
        "member-in-sync-begins-at-0",
        "            if seqno and self._identity.member in self._record_of(vb_id).isr:\n",
        "            if not seqno and self._identity.member in self._record_of(vb_id).isr:\n",
        ("test_following",),
    ),
    Mutation(
        "member-above-a-branch-is-elected",
        "window is None and not _is_branch_below(record, part),\n",
        "window is None,\n",
        ("test_following",),
    ),
    Mutation(
        "floor-above-a-branch-that-was-asked-for",
        "        part.pins.add(seqno)  # no floor rises above it before the branch\n",
        "        part.pins.add(part.high_seqno)\n",
        ("test_leading",),
    ),
)
