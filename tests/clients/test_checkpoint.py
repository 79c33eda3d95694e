import contextlib

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.checkpoint.checkpoint import (
    CheckpointFile,
    MemoryCheckpoint,
    decode_checkpoint,
    decode_position,
    encode_checkpoint,
)
from clients.errors import CheckpointError
from clients.position import RANGES_MAX, RANGES_NEWEST, Filter, Position, rolled_back, thinned

POSITION = Position(((7, 5), (9, 0)), 12, 10, 20, ((0, 4), (8, 8)), 0)
GOLDEN_1 = (
    "a466666f726d61746f646370642d636865636b706f696e746776657273696f6e016563726333321a81a967f569"
    "706f736974696f6e7355a11186828207058209000c0a148282000482080800"
)
GOLDEN_2 = (
    "a466666f726d61746f646370642d636865636b706f696e746776657273696f6e026563726333321a32baad9869"
    "706f736974696f6e735818a11187828207058209000c0a148282000482080800820008"
)


def test_file_keeps_what_was_saved(tmp_path):
    store = CheckpointFile(tmp_path / "c")
    assert store.load() == {}
    store.save({17: POSITION, 3: Position()})
    store.save({17: POSITION})
    assert CheckpointFile(tmp_path / "c").load() == {17: POSITION}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_memory_keeps_a_copy():
    store = MemoryCheckpoint()
    positions = {1: POSITION}
    store.save(positions)
    positions.clear()
    assert store.load() == {1: POSITION}


@given(
    st.dictionaries(
        st.integers(0, 1023),
        st.builds(
            lambda uuid, a, b, c, ids, chosen: Position(
                ((uuid, a),), a + b, a, a + b + c, ((0, a),), 0, ids, chosen
            ),
            *[st.integers(0, 2**50)] * 4,
            st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
            st.none()
            | st.builds(Filter.of, st.none() | st.lists(st.text()), st.lists(st.binary())),
        ),
    )
)
def test_encoding_is_reversible(checkpoint):
    assert decode_checkpoint(encode_checkpoint(checkpoint)) == checkpoint


def test_a_checkpoint_of_the_first_version_is_read():
    """Made by the program that wrote version 1."""
    raw = bytes.fromhex(GOLDEN_1)
    assert decode_checkpoint(raw) == {17: POSITION}
    assert decode_checkpoint(encode_checkpoint(decode_checkpoint(raw))) == {17: POSITION}


def test_a_checkpoint_of_the_second_version_is_read():
    """Made by the program that wrote version 2: it has collections, and no filter."""
    position = POSITION._replace(collections=(0, 8))
    raw = bytes.fromhex(GOLDEN_2)
    assert decode_checkpoint(raw) == {17: position}
    assert decode_checkpoint(encode_checkpoint(decode_checkpoint(raw))) == {17: position}


def test_filters_are_equal_where_they_ask_for_the_same():
    of = Filter.of
    assert of(["b", "a", "b"], [b"y", b"x"]) == of(["a", "b"], [b"x", b"y", b"xx", b"x"])
    assert len({of(None, []), of([], []), of(["a"], []), of(None, [b"x"]), of([0], [])}) == 5
    assert str(of(None, [])) == "the default collection"
    assert str(of([], [b"u:"])) == "everything, keys that begin with 'u:'"
    assert str(of(["s.b", "s.a", 8], [])) == "collections 0x8, s.a, s.b"
    many = of(None, [b"%d" % number for number in range(1, 10)])
    assert str(many).endswith("begin with '1', '2', '3', '4', '5' and 4 more")
    assert r"\xff" in str(of(None, [b"\xff"]))


@pytest.mark.parametrize("entry", [5, [], [None], [None, None], [[8], []], [None, ["text"]]])
def test_what_is_no_filter_is_a_value_error(entry):
    fields = [[[7, 0]], 5, 5, 5, [], 0, None, entry]
    with pytest.raises(ValueError, match="filter"):
        decode_position(cbor2.dumps(fields))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.integers(), inner),
        max_leaves=20,
    )
)
def test_what_is_no_position_is_a_value_error(document):
    with contextlib.suppress(ValueError):
        decode_position(cbor2.dumps(document))


@given(st.data())
def test_damage_is_an_error_and_never_a_position(data):
    raw = bytearray(encode_checkpoint({17: POSITION}))
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] ^= data.draw(st.integers(1, 255))
    else:
        del raw[at:]
    try:
        found = decode_checkpoint(bytes(raw))
    except ValueError:
        return
    assert found == {17: POSITION}, "only a byte that carries nothing may change"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "cut short"),
        (b"hello world", "not a checkpoint|damaged"),
        (
            cbor2.dumps({"format": "dcpd-checkpoint", "version": 4}),
            "format 4; this program reads up to 3",
        ),
        (cbor2.dumps([1]), "not a checkpoint"),
    ],
)
def test_foreign_file_is_refused_and_named(tmp_path, raw, why):
    path = tmp_path / "state"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=why) as caught:
        CheckpointFile(path).load()
    assert str(path) in str(caught.value)
    assert "move this one away" in caught.value.hint


@pytest.mark.parametrize(
    "entry",
    [
        [[], 5, 6, 9, [], 0],
        [[], 5, 1, 4, [], 0],
        [[[1]], 0, 0, 0, [], 0],
        [[[1, -1]], 0, 0, 0, [], 0],
        [[], 0, 0],
        {"a": 1},
    ],
)
def test_position_that_breaks_its_invariants_is_refused(entry):
    import zlib

    positions = cbor2.dumps({1: entry})
    document = {
        "format": "dcpd-checkpoint", "version": 1, "crc32": zlib.crc32(positions),
        "positions": positions,
    }  # fmt: skip
    with pytest.raises(ValueError, match="partition 1"):
        decode_checkpoint(cbor2.dumps(document))


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_a_file_that_cannot_be_written_whole_stays_what_it_was(tmp_path, monkeypatch, step):
    store = CheckpointFile(tmp_path / "c")
    store.save({17: POSITION})

    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(step, fails)
        with pytest.raises(CheckpointError, match="cannot be written: No space left"):
            store.save({17: Position()})
    assert store.load() == {17: POSITION}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_file_in_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointFile(tmp_path / "no" / "c").save({})
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointFile(tmp_path).load()


# -- positions -------------------------------------------------------------------------------------


def position(seqno, complete, versions=((7, 0),), **more):
    return Position(versions, seqno, seqno, seqno, complete, **more)


def test_rollback_goes_to_the_newest_complete_state():
    held = position(100, ((0, 10), (40, 45), (100, 100)))
    assert rolled_back(held, 43).seqno == 43
    assert rolled_back(held, 80).seqno == 45
    assert rolled_back(held, 30).seqno == 10
    assert rolled_back(held, 30).complete == ((0, 10),)


def test_rollback_to_beginning_forgets_everything():
    assert rolled_back(position(100, ((0, 100),)), 50, to_beginning=True) == Position()
    assert rolled_back(position(100, ((0, 100),)), 0) == Position()


def test_rollback_forgets_versions_that_began_above():
    held = position(100, ((0, 100),), versions=((9, 60), (8, 50), (7, 0)))
    assert rolled_back(held, 55).versions == ((8, 50), (7, 0))


def test_unknown_version_is_given_up_for_the_next_older_one():
    held = position(100, ((0, 100),), versions=((9, 60), (7, 0)))
    back = rolled_back(held, 0)
    assert (back.seqno, back.versions) == (60, ((7, 0),))
    assert rolled_back(back, 0) == Position()


def test_unknown_version_that_was_not_reached_costs_nothing():
    held = position(50, ((0, 50),), versions=((9, 60), (7, 0)))
    back = rolled_back(held, 0)
    assert (back.seqno, back.versions) == (50, ((7, 0),))


def test_consumer_from_now_follows_the_server_down():
    held = position(100, ((90, 100),), base_seqno=90)
    back = rolled_back(held, 40)
    assert (back.seqno, back.base_seqno, back.complete) == (40, 40, ((40, 40),))


def test_server_that_names_our_own_place_does_not_stop_us():
    assert rolled_back(position(100, ((0, 100),)), 100).seqno == 99


@settings(max_examples=30)
@given(st.integers(1, 2**40), st.lists(st.integers(1, 2**30), min_size=RANGES_MAX))
def test_thinning_keeps_the_newest_and_is_bounded(start, steps):
    ranges = []
    for step in steps:
        start += step
        ranges.append((start, start))
    kept = thinned(ranges)
    assert kept[-RANGES_NEWEST:] == ranges[-RANGES_NEWEST:]
    assert set(kept) <= set(ranges)
    assert kept == sorted(kept)
    assert len(kept) <= RANGES_NEWEST + 64
