"""A node in memory whose restores go straight into the store, step by step, and a client of it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from dcp.session.answers.held_answers import HeldAnswers
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER_BYTES, Frame, FrameDecoder, pack_request
from dcp.wire.message import FIT_META, PUT_FRAMES_REQUEST
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode, Peer
from vbucket.engine.loading.store_load import LoadReport, LoadRequest, load

FEATURES = (
    Feature.COLLECTIONS, Feature.JSON, Feature.XERROR, Feature.XATTR, Feature.X_PUT_FRAMES,
    Feature.X_FIT_META,
)  # fmt: skip


class LoadingNode(MemoryNode):
    """`load` is what the server's shell and its store process do."""

    loads_anything = True
    is_native = True

    def _open(self) -> None:
        super()._open()
        if self.loads_anything:
            self.engine.loads.on_work = lambda: None

    def load_into_store(
        self, requests: Sequence[LoadRequest], before_commit: Callable[[], None] = lambda: None
    ) -> list[LoadReport]:
        """The store process's part."""
        return load(
            self.env, requests, cas_max=self.engine.cas_max,
            manifest_uid=self.engine.keyspace.manifest.uid, before_commit=before_commit,
            body_bytes_target=self.body_bytes_target, native=self.is_native,
        )  # fmt: skip

    def begin_load(self) -> list[LoadRequest]:
        """What the shell asks for next."""
        if self.engine.loads.wants_merge:
            self.merge()
            self.engine.loads.note_merged()
        self.engine.begin_batch(self.now_ns)
        return self.engine.loads.begin()

    def end_load(self, reports: Sequence[LoadReport]) -> None:
        """Take note of the reports."""
        self.store.refresh()
        self.hub.committed(self.engine.loads.done(reports))
        self.apply()

    def apply(self) -> None:
        """Apply what is not loaded."""
        self.engine.begin_batch(self.now_ns)
        while self.engine.loads.apply_next():
            pass

    def load(self) -> None:
        """Load everything that waits."""
        while self.engine.loads.has_work:
            requests = self.begin_load()
            if requests:
                self.end_load(self.load_into_store(requests))
            self.apply()
        self.commit()


class OrdinaryNode(LoadingNode):
    """The same without loads."""

    loads_anything = False


class RestoringPeer:
    """A client that puts frames, and gets its answers as a connection sends them."""

    def __init__(self, node: MemoryNode) -> None:
        self.peer: Peer = node.connect()
        self.peer.hello(*FEATURES)
        self._node = node
        self._held = HeldAnswers(node.engine)
        self._decoder = FrameDecoder()

    def put(self, vb_id: int, frames: Sequence[bytes], options: int = FIT_META) -> list[Frame]:
        """Send one packet; return the answers that leave at once."""
        sizes = [len(frame) - HEADER_BYTES for frame in frames]
        value = struct.pack(f">{len(sizes)}I", *sizes) + b"".join(frames)
        return self.put_value(vb_id, value, len(frames), options)

    def put_value(
        self, vb_id: int, value: bytes, count: int, options: int = FIT_META
    ) -> list[Frame]:
        packet = pack_request(
            Opcode.X_PUT_FRAMES, vb_id=vb_id, value=value,
            extras=PUT_FRAMES_REQUEST.pack(options, count),
        )  # fmt: skip
        self.peer.session.receive(packet, self._node.now_ns)
        return self._decoder.feed(self._held.take(self.peer.state, 0))

    def answers(self) -> list[Frame]:
        """Return the answers that may leave now."""
        return self._decoder.feed(b"".join(batch.answers for batch in self._held.release()))
