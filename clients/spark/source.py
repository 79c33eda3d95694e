"""The data source `dcp`: the classes that Spark calls on the driver and on executors.

    spark.dataSource.register(DcpDataSource)
    spark.readStream.format("dcp").option("servers", "127.0.0.1:11210").load()

The driver surveys the nodes and plans (`clients.spark.plan`); executors read
(`clients.spark.fetch`). The position of a query is only in Spark's checkpoint
(`clients.spark.offset`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from clients.errors import DcpdError, HistoryBranchedError, TemporaryError
from clients.spark.columns import compared_batch, cut_batch, record_batch, rollback_batch
from clients.spark.compare import Differing, compare
from clients.spark.cut import DrawnCut, draw_cut
from clients.spark.environment import warn_about_workers
from clients.spark.fetch import fetch
from clients.spark.fetch_core import Arrived, StreamGoneError
from clients.spark.offset import (
    COLLECTIONS,
    CUT,
    NO_PARTITIONS,
    Entry,
    Offset,
    entries_of,
    entry_at,
    offset_of,
)
from clients.spark.options import OptionError, SourceSettings, parse_options
from clients.spark.plan import (
    GoneBack,
    PartitionFacts,
    PlanStep,
    are_at,
    next_entries,
    steps_between,
    tasks_of,
)
from clients.spark.sink.table_copy import has_documents
from clients.spark.survey import PATIENCE_S, Survey
from clients.spark.values import value_parser

_T = TypeVar("_T")

DEFAULT_COLLECTION: Final = "_default._default"
"""The collection of a query without the option `collections`."""
LOOK_AGAIN_S: Final = 1.0
"""Minimum interval of full surveys while no seqno changes. A survey costs the server 20 ms. A
branch that leaves the seqnos the same is noticed this much later."""
DRAWS_MAX: Final = 8
"""Cuts that are asked for before a batch ends at none, because branches or compaction pass them."""


class ReadTask(InputPartition):
    """The input of one task: partitions of one node."""

    def __init__(
        self, settings: SourceSettings, steps: tuple[PlanStep, ...],
        collection_ids: tuple[int, ...], cut_time: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(None)
        self.cut_time = cut_time
        """The closed time of the cut at which the batch ends; 0: at none."""
        self.settings = settings
        self.steps = steps
        self.collection_ids = collection_ids


class DcpDataSource(DataSource):
    """The data source `dcp`. docs/spark.md lists its options and columns."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        parse_options(options)

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`. Spark asks for it when the source is registered."""
        warn_about_workers()
        return "dcp"

    def schema(self) -> str:
        """Return the columns."""
        return parse_options(self.options).schema

    def reader(self, schema: StructType) -> DcpReader:
        """Return the reader of `spark.read`."""
        return DcpReader(parse_options(self.options, is_batch=True), schema)

    def streamReader(self, schema: StructType) -> DcpStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of `spark.readStream`."""
        return DcpStreamReader(parse_options(self.options), schema)


class _Planner:
    """The driver's part of both readers."""

    def __init__(self, settings: SourceSettings, patience_s: float) -> None:
        self.settings = settings
        self.survey = Survey(settings.servers, settings.partitions, patience_s=patience_s)
        self._patience_s = patience_s
        self._collection_ids: tuple[int, ...] | None = None

    def collection_ids(self) -> tuple[int, ...]:
        """Return the ids of the requested collections."""
        if self._collection_ids is None:
            names = self.settings.collections
            self._collection_ids = (0,) if names is None else self.survey.collection_ids(names)
        return self._collection_ids

    def first_entries(self) -> dict[int, Entry]:
        """Return the positions at which a new query starts."""
        starting = self.settings.starting
        if starting == "earliest":
            return {}
        facts = {fact.vb_id: fact for fact in self.survey.facts(all_of_them=True)}
        if starting == "latest":
            seqnos = {vb_id: fact.high_seqno for vb_id, fact in facts.items()}
            return _based(seqnos, facts)
        if isinstance(starting, int):
            return _based(self.survey.seqnos_at(starting), facts)
        assert isinstance(starting, dict)
        told = {vb: text for vb, text in starting.items() if not text.isdecimal()}
        numbers = {int(vb): int(text) for vb, text in starting.items() if text.isdecimal()}
        for vb_id, seqno in numbers.items():
            if vb_id in facts and seqno > facts[vb_id].high_seqno:
                raise OptionError(
                    f"option startingOffsets: partition {vb_id} is at seqno"
                    f" {facts[vb_id].high_seqno}, so it cannot start at {seqno}"
                )
        return {**entries_of(told), **_based(numbers, facts)}

    def next_entries(
        self, entries: Mapping[int, Entry], facts: Sequence[PartitionFacts], **limits: Any
    ) -> tuple[dict[int, Entry], list[GoneBack]]:
        """Return where the next batch ends, and the partitions that it rolls back."""
        table = self.settings.table
        return next_entries(
            entries, facts, history=self.settings.history, compares=bool(table),
            is_lost=bool(table) and not entries and has_documents(table), **limits,
        )  # fmt: skip

    def draw(self) -> DrawnCut:
        """Return the next cut, when all partitions are active."""
        self.survey.high_seqnos(all_of_them=True)  # its error names those that are not
        return draw_cut(self.settings, self._patience_s)

    def ends_at_cut(
        self, entries: Mapping[int, Entry], drawn: DrawnCut | None = None
    ) -> tuple[dict[int, Entry], list[GoneBack], int]:
        """Return where a batch ends that ends at a cut, what it rolls back, and the closed time.

        `drawn`: the cut to take, if the server can still stream up to it.
        """
        for _ in range(DRAWS_MAX):
            cut = drawn or self.draw()
            facts = self.survey.facts(all_of_them=True)
            ends, gone_back = self.next_entries(entries, facts, targets=cut.seqnos)
            if are_at(cut.positions, ends, facts):
                return ends, gone_back, cut.time
            drawn = None
        raise TemporaryError(
            f"history branches, or is compacted, faster than batches can be planned: each of"
            f" {DRAWS_MAX} cuts was passed",
            node=self.settings.servers[0].node,
        )

    def tasks(self, steps: Sequence[PlanStep], cut_time: int = 0) -> list[InputPartition]:
        """Return the tasks that read these steps.

        A task reads from one node. There are about numPartitions tasks, at least one per node; with
        the option consistent there is one to name the cut, if there is nothing to read.
        """
        if not steps:
            is_told = self.settings.consistent
            return [ReadTask(self.settings, (), self.collection_ids(), cut_time)] * is_told
        topology = self.survey.topology()
        groups: dict[int, list[PlanStep]] = {}
        for step in steps:
            index = max(topology.vbucket_map[step.vb_id], 0)
            groups.setdefault(index, []).append(step)
        each = max(1, self.settings.num_partitions // len(groups))
        return [
            ReadTask(self.settings, task, self.collection_ids(), cut_time)
            for group in groups.values()
            for task in tasks_of(group, each)
        ]


def _based(seqnos: dict[int, int], facts: dict[int, PartitionFacts]) -> dict[int, Entry]:
    """Return entries that start at these seqnos and never read below them."""
    return {
        vb_id: entry_at(seqno, facts[vb_id].versions, base_seqno=seqno)
        for vb_id, seqno in seqnos.items()
        if seqno and vb_id in facts
    }


class DcpReader(DataSourceReader):
    """`spark.read`: all changes from the starting offsets up to now."""

    def __init__(
        self, settings: SourceSettings, schema: StructType, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._settings = settings
        self._schema = schema
        self._patience_s = patience_s

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks."""
        return _in_words(self._partitions)

    def _partitions(self) -> Sequence[InputPartition]:
        planner = _Planner(self._settings, self._patience_s)
        try:
            first, cut_time = planner.first_entries(), 0
            if self._settings.consistent:
                last, gone_back, cut_time = planner.ends_at_cut(first)
            else:
                facts = planner.survey.facts(all_of_them=True)
                last, gone_back = next_entries(first, facts, history=self._settings.history)
            if gone_back:
                raise _branched(gone_back)
            return planner.tasks(steps_between(offset_of(first), offset_of(last)), cut_time)
        finally:
            planner.survey.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the changes of one task."""
        if not isinstance(partition, ReadTask):
            return iter(())  # Spark passes its own partition if there is nothing to read
        return read_task(partition, self._schema, is_batch=True)


class DcpStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream`. Executors get a fresh copy, so `read` keeps no state."""

    def __init__(
        self,
        settings: SourceSettings,
        schema: StructType,
        *,
        patience_s: float = PATIENCE_S,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        self._settings = settings
        self._schema = schema
        self._look_again_s = look_again_s
        self._planner = _Planner(settings, patience_s)
        self._targets: dict[int, int] | None = None
        self._target_cut: DrawnCut | None = None
        self._seen: dict[int, int] | None = None
        """High seqnos at the last full survey."""
        self._seen_at_s = 0.0
        self._latest: Offset | None = None
        names = settings.collections
        self._collections = ",".join(sorted(names)) if names else DEFAULT_COLLECTION

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        """Return the offset at which a new query starts."""
        return _in_words(lambda: offset_of(self._planner.first_entries()))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit that the options ask for."""
        if self._settings.rows_max is not None:
            return ReadMaxRows(self._settings.rows_max)
        if self._settings.bytes_max is not None:
            return ReadMaxBytes(self._settings.bytes_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Take the current high seqnos as the end: nothing newer is read. Or the next cut."""
        if self._settings.consistent:
            self._target_cut = _in_words(self._planner.draw)
            return
        survey = self._planner.survey
        self._targets = _in_words(lambda: survey.high_seqnos(all_of_them=True))

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        """Return the end of the next batch; `start` itself if there is nothing new."""
        return _in_words(lambda: self._latest_offset(start, limit))

    def reportLatestOffset(self) -> dict[str, str] | None:  # noqa: N802
        """Return the offset at the last survey, for progress reports."""
        return self._latest

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Return the tasks of a batch. What they read depends only on the two offsets."""
        return _in_words(lambda: self._partitions(start, end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the changes of one task."""
        assert isinstance(partition, ReadTask)
        return read_task(partition, self._schema, is_batch=False)

    def stop(self) -> None:
        """Close the driver's connections."""
        self._planner.survey.close()

    def _partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        self._check(start)
        self._check(end)
        return self._planner.tasks(steps_between(start, end), int(end.get(CUT, 0)))

    def _check(self, offset: Offset) -> None:
        """Raise DcpdError if an offset belongs to a query on other collections."""
        found = offset.get(COLLECTIONS, self._collections)
        if found != self._collections:
            raise DcpdError(
                f"the checkpoint belongs to a query on the collections {found}, but this query"
                f" reads {self._collections}",
                hint="Resuming from it would skip documents. Use the option collections as before,"
                " or start with another checkpointLocation.",
            )

    def _offset_of(self, entries: dict[int, Entry], start: Offset, cut_time: int = 0) -> Offset:
        """Return the offset of a batch's end; `start` itself if nothing is new.

        Spark compares offsets as text, so an unchanged offset must be the same object.
        """
        end = offset_of(entries)
        if end == {name: text for name, text in start.items() if name not in NO_PARTITIONS}:
            return start
        cut = {CUT: str(cut_time)} if cut_time else {}
        return {**end, COLLECTIONS: self._collections, **cut}

    def _latest_offset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:
        self._check(start)
        survey = self._planner.survey
        now_s = time.monotonic()
        if self._seen is not None and now_s - self._seen_at_s < self._look_again_s:
            high = survey.high_seqnos()
            if high == self._seen and start == self._latest:
                return start
        facts = survey.facts()
        self._seen = {fact.vb_id: fact.high_seqno for fact in facts}
        self._seen_at_s = now_s
        entries = entries_of(start)
        ends, gone_back = self._planner.next_entries(entries, facts, targets=self._targets)
        if gone_back and self._settings.fails_on_rollback:
            raise _branched(gone_back)
        self._latest = self._offset_of(ends, start)
        if self._settings.consistent and self._latest is not start:
            self._latest = self._offset_at_cut(start)
            return self._latest
        rows_max = self._rows_max(start, self._latest, limit)
        if rows_max is not None:
            ends, _ = self._planner.next_entries(
                entries, facts, targets=self._targets, rows_max=rows_max
            )
        return self._offset_of(ends, start)

    def _offset_at_cut(self, start: Offset) -> Offset:
        """Return the end of a batch that ends at a cut."""
        planner = self._planner
        ends, gone_back, cut_time = planner.ends_at_cut(entries_of(start), self._target_cut)
        if gone_back and self._settings.fails_on_rollback:
            raise _branched(gone_back)
        return self._offset_of(ends, start, cut_time)

    def _rows_max(self, start: Offset, end: Offset, limit: ReadLimit) -> int | None:
        """Return the maximum rows of a batch under Spark's limit and our two; None: no limit."""
        if isinstance(limit, ReadAllAvailable) or end == start:
            return None
        limits = []
        rows_max, bytes_max = self._settings.rows_max, self._settings.bytes_max
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        if rows_max is not None:
            limits.append(rows_max)
        steps = [step for step in steps_between(start, end) if not step.compares]
        if bytes_max is not None and steps:
            row_bytes = self._planner.survey.row_bytes(
                steps,
                history=self._settings.history,
                collection_ids=self._planner.collection_ids(),
            )
            limits.append(max(1, int(bytes_max / row_bytes)))
        return min(limits, default=None)


def read_task(task: ReadTask, schema: StructType, *, is_batch: bool) -> Iterator[pa.RecordBatch]:
    """Yield the changes of a task, as batches with exactly Spark's schema."""
    settings = task.settings
    arrow = to_arrow_schema(schema, timezone="UTC")
    parse = value_parser(settings.value_format, arrow.field("value").type)
    names = None
    if settings.collections is not None:
        names = dict(zip(task.collection_ids, settings.collections, strict=True))
    steps = [step for step in task.steps if not step.compares]
    are_exact = True
    try:
        for each in _compared(task, steps):
            if each.changes is not None:
                yield record_batch(each.changes, arrow, parse, names)
            gone = [(key, (names or {}).get(number, "")) for number, key in each.gone]
            yield compared_batch(each.step.vb_id, each.step.end_seqno, settings.table, gone, arrow)
            are_exact = are_exact and each.seqno == each.step.end_seqno
            for arrived in _fetched(task, [each.rest] if each.rest else ()):
                if arrived.rollbacks:
                    raise StreamGoneError(
                        "the server rolled back below what a comparison has read",
                        vb_id=each.step.vb_id,
                    )
                if arrived.changes is not None:
                    yield record_batch(arrived.changes, arrow, parse, names)
        arriving = _Arriving(_fetched(task, steps))
        for arrived in arriving:
            if arrived.rollbacks:
                if settings.fails_on_rollback or is_batch:
                    raise _cut(arrived.rollbacks[0][0])
                yield rollback_batch(arrived.rollbacks, arrow)
            if arrived.changes is not None:
                yield record_batch(arrived.changes, arrow, parse, names)
        if settings.consistent:
            are_exact = are_exact and arriving.is_exact
            if is_batch and not are_exact:
                raise _cut(None)
            yield cut_batch(task.cut_time if are_exact else 0, arrow)
    except DcpdError as error:
        raise _with_hint(error) from error


def _compared(task: ReadTask, left: list[PlanStep]) -> Iterator[Differing]:
    """Yield in what partitions of a task differ from the table, of those that are compared with it.
    Those that have to be read from 0 are added to `left`.
    """
    settings = task.settings
    collections = settings.collections or (DEFAULT_COLLECTION,)
    ids = dict(zip(collections, task.collection_ids, strict=True))
    compares = [step for step in task.steps if step.compares]
    return compare(settings.servers, compares, settings.table, ids, left)


def _fetched(task: ReadTask, steps: Sequence[PlanStep]) -> Generator[Arrived, None, bool]:
    settings = task.settings
    return fetch(
        settings.servers, steps,
        history=settings.history, xattrs=settings.xattrs, collection_ids=task.collection_ids,
        from_replicas=settings.from_replicas,
    )  # fmt: skip


class _Arriving:
    """What a task fetches, and afterwards whether each partition ended where the batch does."""

    def __init__(self, fetching: Generator[Arrived, None, bool]) -> None:
        self._fetching = fetching
        self.is_exact = False

    def __iter__(self) -> Iterator[Arrived]:
        self.is_exact = yield from self._fetching


def _cut(vb_id: int | None) -> HistoryBranchedError:
    what = "partitions were" if vb_id is None else "the partition was"
    return HistoryBranchedError(
        f"history branched, or was compacted, while {what} read",
        vb_id=vb_id,
        hint="Read again. With onRollback=emit a stream continues by itself.",
    )


def _branched(gone_back: list[GoneBack]) -> HistoryBranchedError:
    """Return the error of onRollback=fail. It names the partition and the versions."""
    first = gone_back[0]
    known = ", ".join(f"{vb_uuid:x} from seqno {seqno}" for vb_uuid, seqno in first.versions)
    theirs = ", ".join(
        f"{vb_uuid:x} from seqno {seqno}" for vb_uuid, seqno in first.server_versions
    )
    others = f" (and {len(gone_back) - 1} more partitions)" if len(gone_back) > 1 else ""
    return HistoryBranchedError(
        f"the query is at seqno {first.from_seqno} and must go back to seqno"
        f" {first.to_seqno}{others}: it knows the versions {known or '(none)'}, the server has"
        f" {theirs}",
        vb_id=first.vb_id,
        hint="With the option onRollback=emit the query gets a rollback row and continues.",
    )


def _in_words(ask: Callable[[], _T]) -> _T:
    """Call `ask`. Spark shows only an error's text, so the hint is added to the text."""
    try:
        return ask()
    except DcpdError as error:
        raise _with_hint(error) from error


def _with_hint(error: DcpdError) -> DcpdError:
    return DcpdError(f"{error} {error.hint}".strip(), hint="")
