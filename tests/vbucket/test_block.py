"""Blocks hold what was put in, and notice every flipped bit."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.model.entry import seqno_of
from vbucket.store.block import (
    BODY_BYTES_TARGET,
    Block,
    BlockDamagedError,
    block_key,
    build_blocks,
    follow_seqno,
    repack_blocks,
)


def entries_of(
    seqnos: list[int], *, epochs: list[int] | None = None, value: bytes = b"value"
) -> list[bytes]:
    return [
        pack_mutation(vb_id=5, key=b"\x00key%d" % seqno, value=value, cas=seqno << 16, seqno=seqno,
                      rev_seqno=1, prev_seqno=seqno // 2, epoch=epochs[index] if epochs else 0)
        if seqno % 5 else
        pack_deletion(vb_id=5, key=b"\x00key%d" % seqno, cas=1, seqno=seqno, rev_seqno=2,
                      epoch=epochs[index] if epochs else 0)
        for index, seqno in enumerate(seqnos)
    ]  # fmt: skip


def opened(blocks: list[tuple[bytes, bytes]]) -> list[Block]:
    return [Block(key, value) for key, value in blocks]


@given(
    gaps=st.lists(st.integers(1, 3), min_size=1, max_size=40),
    epoch_steps=st.data(),
    value_bytes=st.sampled_from([0, 10, 9000, BODY_BYTES_TARGET + 1]),
)
def test_blocks_give_back_the_entries(
    gaps: list[int], epoch_steps: st.DataObject, value_bytes: int
) -> None:
    seqnos, epochs, seqno, epoch = [], [], 0, 0
    for gap in gaps:
        seqno += gap
        epoch += epoch_steps.draw(st.sampled_from([0, 0, 0, 1]))
        seqnos.append(seqno)
        epochs.append(epoch)
    entries = entries_of(seqnos, epochs=epochs, value=bytes(value_bytes))
    blocks = opened(build_blocks(5, entries, seqno_before=0))
    assert [entry for block in blocks for entry in block.entries()] == entries
    before = 0
    for block in blocks:
        assert block.seqno_before == before
        assert len(block.body) <= BODY_BYTES_TARGET or len(block.seqnos) == 1
        before = block.last_seqno
    by_seqno = dict(zip(seqnos, entries, strict=True))
    for block in blocks:
        for wanted in range(block.first_seqno, block.last_seqno + 1):
            assert block.entry(wanted) == by_seqno.get(wanted)
        assert block.entry(block.last_seqno + 1) is None
        assert block.entry(block.first_seqno - 1) is None


@given(
    gaps=st.lists(st.integers(1, 3), min_size=1, max_size=40),
    kept=st.lists(st.sampled_from([0, 1, 1]), min_size=40, max_size=40),
    newer_epoch_at=st.integers(0, 40),
    value_bytes=st.sampled_from([0, 10, 9000, BODY_BYTES_TARGET + 1]),
)
def test_what_is_kept_of_blocks_makes_the_blocks_of_its_entries(
    gaps: list[int], kept: list[int], newer_epoch_at: int, value_bytes: int
) -> None:
    seqnos = list(accumulate(gaps, initial=3))[1:]
    epochs = [int(index >= newer_epoch_at) for index in range(len(seqnos))]
    entries = entries_of(seqnos, epochs=epochs, value=bytes(value_bytes))
    parts: list[tuple[Block, bytes | None]] = []
    first = 0
    for block in opened(build_blocks(5, entries, seqno_before=3)):
        mask = bytes(kept[first : first + len(block.seqnos)])
        parts.append((block, mask if 0 in mask else None))
        first += len(block.seqnos)
    left = [entry for entry, is_kept in zip(entries, kept, strict=False) if is_kept]
    assert repack_blocks(5, parts, seqno_before=3) == build_blocks(5, left, seqno_before=3)


def test_a_damaged_block_is_not_packed_again() -> None:
    ((key, value),) = build_blocks(5, entries_of([1, 2]), seqno_before=0)
    damaged = Block(key, value[:-1] + b"?")
    with pytest.raises(BlockDamagedError, match="body"):
        repack_blocks(5, [(damaged, b"\1\0")], seqno_before=0)
    with pytest.raises(BlockDamagedError, match="body"):
        follow_seqno(damaged, 0)


@pytest.mark.parametrize("seqnos", [[1, 2, 3, 4], [1, 2, 4, 9]])
@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_tail_with_room_is_extended(seqnos: list[int], split: int) -> None:
    entries = entries_of(seqnos)
    first = build_blocks(5, entries[:split], seqno_before=0)
    (tail,) = opened(first)
    more = build_blocks(5, entries[split:], seqno_before=tail.last_seqno, tail=tail)
    assert more == build_blocks(5, entries, seqno_before=0)


def test_a_full_tail_and_one_of_another_epoch_stay_as_they_are() -> None:
    (tail,) = opened(build_blocks(5, entries_of([1], value=bytes(60_000)), seqno_before=0))
    large = entries_of([2], value=bytes(9_000))
    (block,) = opened(build_blocks(5, large, seqno_before=1, tail=tail))
    assert (block.first_seqno, block.seqno_before) == (2, 1)
    newer = entries_of([2], epochs=[1])
    (block,) = opened(build_blocks(5, newer, seqno_before=1, tail=tail))
    assert (block.first_seqno, block.seqno_before, block.epoch) == (2, 1, 1)


def test_a_damaged_tail_is_not_given_a_new_checksum() -> None:
    ((key, value),) = build_blocks(5, entries_of([1, 2]), seqno_before=0)
    tail = Block(key, value[:-1] + b"?")
    with pytest.raises(BlockDamagedError, match="body"):
        build_blocks(5, entries_of([3]), seqno_before=2, tail=tail)


def test_no_entries_make_no_block() -> None:
    assert build_blocks(5, [], seqno_before=7) == []


@pytest.mark.parametrize(("seqnos", "before"), [([2, 2], 0), ([3, 2], 0), ([4], 4), ([4], 9)])
def test_seqnos_that_do_not_ascend_are_refused(seqnos: list[int], before: int) -> None:
    with pytest.raises(ValueError, match="partition 5: seqnos do not ascend"):
        build_blocks(5, entries_of(seqnos), seqno_before=before)


@pytest.mark.parametrize("seqnos", [[7, 8, 9], [7, 8, 11]], ids=["dense", "gaps"])
def test_every_flipped_bit_is_noticed(seqnos: list[int]) -> None:
    """A single get gives the right entry or an error; so does a scan."""
    entries = entries_of(seqnos)
    ((key, value),) = build_blocks(5, entries, seqno_before=3)
    wanted = {seqno_of(entry): entry for entry in entries}
    whole = key + value
    refused_gets = 0
    for position in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            bad_key, bad_value = bytes(flipped[: len(key)]), bytes(flipped[len(key) :])
            with pytest.raises(BlockDamagedError):
                Block(bad_key, bad_value).entries()
            for seqno in range(6, 13):
                try:
                    assert Block(bad_key, bad_value).entry(seqno) == wanted.get(seqno)
                except BlockDamagedError:
                    refused_gets += 1
    assert refused_gets > len(whole)


@pytest.mark.parametrize("size", [0, 1, 50, -1])
def test_a_block_that_is_cut_short_is_noticed(size: int) -> None:
    ((key, value),) = build_blocks(5, entries_of([1, 2]), seqno_before=0)
    with pytest.raises(BlockDamagedError, match="partition 5: the block of seqnos 1 to"):
        Block(key, value[:size])


def test_keys_sort_by_partition_and_seqno() -> None:
    pairs = [(0, 0), (0, 255), (0, 256), (1, 0), (255, 2**64 - 1), (256, 1)]
    keys = [block_key(vb_id, seqno) for vb_id, seqno in pairs]
    assert keys == sorted(keys)
