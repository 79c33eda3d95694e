"""The mutations: one faulty line of product code each, and the test files that shall find it.

A mutation names no file: its old text occurs exactly once in the product packages
(tests/test_mutations.py checks that), so code may move. Test files are named without their folder.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation
from tests.mutations.replication import REPLICATION

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
        "        if known.opcode == MUTATION and 0 < known.expiry <= self.now_s:\n",
        "        if known.opcode == MUTATION and 0 < known.expiry < self.now_s:\n",
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
        "            if segment != merged_segment + 1:\n",
        "            if segment < merged_segment:\n",
        ("test_merge",),
    ),
    Mutation(
        "unfinished-merge-replayed",
        "        if group > self._part_merged.group:\n",
        "        if group >= self._part_merged.group:\n",
        ("test_merge_slices", "test_power_loss"),
    ),
    Mutation(
        "unfinished-merge-merged-twice",
        "                    payload = entries_from(payload, part.vb_id)",
        "                    payload = entries_from(payload, part.vb_id - 1)",
        ("test_merge", "test_merge_slices"),
    ),
    Mutation(
        "quarantine-of-later-slices-stored",
        "in staging.quarantine.items() if vb_id < next_vb_id\n",
        "in staging.quarantine.items()\n",
        ("test_merge_slices",),
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
        "            self._device.mark(slot, pack_mark(end, sequence))\n",
        "            pass\n",
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
        "        limit, floor = part.committed_seqno, part.history_floor\n",
        "        limit, floor = part.high_seqno, part.history_floor\n",
        ("test_stream_snapshots", "test_stream_model"),
    ),
    Mutation(
        "acknowledgement-off-by-one",
        "            self.unacked_bytes -= counted_bytes\n",
        "            self.unacked_bytes -= counted_bytes + 1\n",
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
        "        if job.is_synced:\n            sync()\n",
        "        if job.group.branched:\n            sync()\n",
        ("test_committer", "test_failing_sync", "test_node_durability"),
    ),
    Mutation(
        "slow-disk-stops-the-loop",
        "        self.avoiding = self._avoids_next\n",
        "        self.avoiding = 0\n",
        ("test_committer",),
    ),
    Mutation(
        "thread-forgets-a-failed-sync",
        "        if written.sync_errno:\n",
        "        if written.sync_errno < 0:\n",
        ("test_log_thread",),
        needs_loops=True,
    ),
    Mutation(
        "thread-writes-while-zeros-are-written",
        "if self._group_thread is None or self.ahead.is_reserving or not job.is_synced:\n",
        "if self._group_thread is None or not job.is_synced:\n",
        ("test_log_thread",),
        needs_loops=True,
    ),
    Mutation(
        "end-not-marked-before-the-mark-is-synced",
        "        self._next_mark_sync = None\n        self._writer.mark_end()\n",
        "        self._next_mark_sync = None\n",
        ("test_committer",),
    ),
    Mutation(
        "merges-rest-while-somebody-waits",
        "            if self._must_hurry:\n                self._duty",
        "            if not loop:\n                self._duty",
        ("test_merging",),
    ),
    Mutation(
        "merges-never-rest",
        "        self._rest = 1 / share - 1\n",
        "        self._rest = 0.0\n",
        ("test_rests", "test_store_process"),
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
        "        if state.first_change < 0 or not state.wait_group:\n",
        "        if state.first_change < 0:\n",
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
        "        self.versions = versions\n        self.leave_snapshot()\n",
        "        self.leave_snapshot()\n",
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
        "        return Reaction.LOST if is_safe else Reaction.END\n",
        "        return Reaction.LOST\n",
        ("test_kv",),
    ),
    Mutation(
        "unsure-write-told-as-undone",
        "is_unsure=is_unsure or index in self._unsure, note=note,",
        "is_unsure=is_unsure, note=note,",
        ("test_kv_call",),
    ),
    Mutation(
        "read-waits-for-a-deposed-master",
        "leave = [at for at in moved if at in waits and self._is_read(send, at)]",
        "leave: list[int] = []",
        ("test_kv_call",),
    ),
    Mutation(
        "older-map-after-a-lost-connection",
        "newest is not None and topology.revision < newest.revision and not is_last",
        "newest is not None and topology.revision < (0, 0) and not is_last",
        ("test_link_topology", "test_consumer_placement"),
    ),
    Mutation(
        "replica-shows-uncommitted-versions",
        "        while entry is not None and seqno_of(entry) > part.committed_seqno:\n",
        "        while entry is not None and seqno_of(entry) > part.high_seqno:\n",
        ("test_session_document_reads",),
    ),
    Mutation(
        "replica-behind-a-token-answers",
        "    if reached is None or reached < seqno:\n",
        "    if reached is None:\n",
        ("test_session_document_reads",),
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
        "find_run(buffer, at, end, feed.seqno, feed.marker_end)",
        "find_run(buffer, at, end, max(feed.seqno, 1) - 1, feed.marker_end)",
        ("test_backup_intake", "test_change_runs"),
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
    *REPLICATION,
)
