"""Sorts the entries of the log by partition, for one merge. Pure.

Control entries are applied at once; changes wait until the merge of their partition. The native
loops (`vbucket.native`), if they are built, keep these without an object for each. A partition that
is rolled back, or whose highest CAS is lowered, is listed: Python has its entries.

Who calls it: `vbucket.upkeep.merge`.

Invariant: the entries of a partition are in one place, in the order of the log: in the stage's list
(then `_appends` has the partition), or in `_staged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vbucket.log.record import split_entries
from vbucket.model.control import control_document, epoch_of, floor_and_purge
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, PREFIX_BYTES, head_of
from vbucket.model.manifest import Manifest
from vbucket.native import new_staged
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import NodeRecord, Quarantined
from vbucket.store.store import StoreView
from vbucket.upkeep.stage import Stage, cas_of

if TYPE_CHECKING:
    from vbucket.native.loops import Staged

_VB_AT = PREFIX_BYTES + 6


class MergeRefusedError(Exception):
    """The segments do not match the store; nothing was merged."""


class PartitionDamagedError(Exception):
    """The stored data of a partition is damaged; the transaction is aborted."""

    def __init__(self, vb_id: int, cause: StoreDamagedError) -> None:
        super().__init__(str(cause))
        self.vb_id = vb_id
        self.cause = cause


@contextmanager
def naming_damage(vb_id: int) -> Iterator[None]:
    """Name the partition in errors about damaged data."""
    try:
        yield
    except StoreDamagedError as error:
        raise PartitionDamagedError(vb_id, error) from error


class Staging:
    """Entries of the log, grouped by partition."""

    def __init__(
        self, view: StoreView, node: NodeRecord, damaged: Mapping[int, str], *, native: bool
    ) -> None:
        self._view = view
        self.node = node
        self.manifest = view.manifest()
        self.stages: dict[int, Stage] = {}
        self.quarantine = view.quarantine()
        """The partitions that are left out: those of earlier merges, and new ones with entries."""
        self._damaged = damaged
        """Partitions that are left out from this merge on, and why."""
        self._segment = 0
        self._entries = 0
        """Those that Python saw."""
        self._appends: dict[int, Callable[[bytes], None]] = {}
        self._staged = new_staged() if native else None

    @property
    def entries(self) -> int:
        """How many entries were staged, control entries and those that are left out included."""
        return self._entries + (0 if self._staged is None else self._staged.entries)

    def add_group(self, segment: int, payload: bytes) -> None:
        """Stage the entries of one commit group."""
        self._segment = segment
        if self._staged is not None:
            self._add_natively(self._staged, payload)
            return
        appends = self._appends
        entries = split_entries(payload)
        self._entries += len(entries)
        for entry in entries:
            vb_id = entry[_VB_AT] << 8 | entry[_VB_AT + 1]
            if entry[OPCODE_AT] == LOG_CONTROL:
                self._add_control(vb_id, control_document(entry))
            elif vb_id in appends:
                appends[vb_id](entry)
            elif self._is_left_out(vb_id):
                self._leave_out(vb_id, int.from_bytes(cas_of(entry), "big"))
            else:
                self._stage(vb_id).entries.append(entry)

    def _add_natively(self, staged: Staged, payload: bytes) -> None:
        """Do the same; entries that the native loops do not take come here one by one."""
        at = staged.add(payload, 0)
        while at != len(payload):
            if at < 0:
                split_entries(payload)  # raises
                raise AssertionError("both find that the entries' lengths do not add up")
            end = at + head_of(payload, at).entry_bytes
            entry = payload[at:end]
            vb_id = entry[_VB_AT] << 8 | entry[_VB_AT + 1]
            if entry[OPCODE_AT] == LOG_CONTROL:
                self._add_control(vb_id, control_document(entry))
            elif vb_id in self._appends:
                self._appends[vb_id](entry)
            elif self._is_left_out(vb_id):
                self._leave_out(vb_id, int.from_bytes(cas_of(entry), "big"))
            else:
                self._stage(vb_id)  # now it is open for this entry
                end = at
            self._entries += end > at
            at = staged.add(payload, end)

    def staged(self, vb_id: int) -> Staged | None:
        """Return the native loops if they have a partition's entries."""
        return None if vb_id in self._appends else self._staged

    def list_entries(self, stage: Stage) -> None:
        """Put the entries of a partition into its stage, if they are not there."""
        staged = self.staged(stage.vb_id)
        if staged is not None:
            stage.entries = staged.close(stage.vb_id)
            self._appends[stage.vb_id] = stage.entries.append

    def _is_left_out(self, vb_id: int) -> bool:
        return vb_id in self.quarantine or vb_id in self._damaged

    def _leave_out(self, vb_id: int, cas: int = 0) -> None:
        """Note that the log has an entry of a partition that is left out."""
        item = self.quarantine.get(vb_id)
        if item is None:
            item = Quarantined(self._segment, self._segment, 0, self._damaged[vb_id])
        if item.last_segment < self._segment or item.max_cas < cas or vb_id not in self.quarantine:
            self.quarantine[vb_id] = item._replace(
                last_segment=self._segment, max_cas=max(item.max_cas, cas)
            )

    def _add_control(self, vb_id: int, document: dict[str, Any]) -> None:
        kind = document["kind"]
        if kind == "durability":
            self.node = self.node._replace(durability=document["level"])
            return
        if kind == "hw":
            return  # the first group of every segment tells all of them again
        if kind == "manifest":
            self.manifest = Manifest.from_document(document["manifest"])
            return
        if self._is_left_out(vb_id):
            if vb_id in self._damaged or document.get("rollback_to") != 0:
                self._leave_out(vb_id)
                return
            # Neither the stored data nor what was left out is needed any more.
            item = self.quarantine.pop(vb_id)
            stage = self._stage(vb_id)
            stage.record = stage.record._replace(max_cas=max(stage.record.max_cas, item.max_cas))
        stage = self._stage(vb_id)
        if kind == "state":
            stage.record = stage.record._replace(state=document["state"])
        elif kind in {"floor", "purge"}:
            floor, purge = floor_and_purge(document)
            stage.record = stage.record._replace(
                history_floor=max(stage.record.history_floor, floor),
                purge_seqno=max(stage.record.purge_seqno, purge),
            )
        elif kind == "snapshot":
            stage.take_snapshot(document)
        elif kind == "cas":
            self.list_entries(stage)
            stage.lower_cas(document["mended"])
        elif kind == "failover":
            log = document["log"]
            if document.get("rollback_to") is not None:
                self.list_entries(stage)
                stage.roll_back(document["rollback_to"])
            epoch = max(stage.record.epoch, epoch_of(document))
            stage.record = stage.record._replace(failover=log, epoch=epoch)
        elif kind == "epoch":
            epoch = max(stage.record.epoch, epoch_of(document))
            stage.record = stage.record._replace(epoch=epoch)
        else:
            raise MergeRefusedError(
                f"partition {vb_id}: the log holds a control entry of the unknown kind {kind!r}; "
                "use the "
                "version of dcpd that wrote it"
            )

    def _stage(self, vb_id: int) -> Stage:
        stage = self.stages.get(vb_id)
        if stage is None:
            with naming_damage(vb_id):
                record = self._view.partition(vb_id)
            if record is None:
                raise MergeRefusedError(
                    f"the log has changes of partition {vb_id}, which the store does not know; the "
                    "folder's log and store do not belong together"
                )
            stage = self.stages[vb_id] = Stage(vb_id, record)
            if self._staged is None or not self._staged.open(vb_id):
                self._appends[vb_id] = stage.entries.append
        return stage
