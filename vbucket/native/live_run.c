/* See live_run.h. vbucket/native/loops.pyi has the interface. Who calls it: dcp/stream/producer.py;
   that and dcp/stream/snapshots.py have the rules, and do whatever this loop does not do.

   Invariants
   - a snapshot is sent as a whole, or nothing has changed;
   - it has what `SnapshotWriter` would send for it in one turn: marker, changes, end;
   - all its changes are mutations in the active layer, each of another key, which the client gets
     as they are stored, but for the collection's byte. They are of the default collection, or the
     client gets everything, or those of one other collection: then what is of others is left out;
   - a snapshot is cut once for all streams that get the same: a cut is known by its last entry,
     which is kept with it. No entry above it was there before, so those below it are the same;
   - nothing beyond the pending cut of the connection is sent (dcp/stream/pending_cut.py). */

#include "live_run.h"

#include "attributes.h"
#include "blocks.h"

#include <string.h>

#define HEADER_BYTES 24
#define MARKER_BYTES (HEADER_BYTES + 20)
#define SNAPSHOT_END_BYTES (HEADER_BYTES + 8)
#define ADVANCED_BYTES (HEADER_BYTES + 8)
#define SEQNO_ADVANCED 0x64
#define SNAPSHOT_MARKER 0x56
#define SNAPSHOT_END 0xEE
#define MEMORY 1              /* flag of a marker */
#define CHANGES_MAX 256       /* of a snapshot */
#define CUTS 1024             /* the newest of each partition */
#define CUTS_BYTES_MAX (4 << 20)
#define MUTATION_EXTRAS_BYTES 31
#define MUTATION_BYTES_MIN (PREFIX_BYTES + HEADER_BYTES + MUTATION_EXTRAS_BYTES + 1)
#define ENTRY_OPCODE_AT (PREFIX_BYTES + 1)
#define ENTRY_DATATYPE_AT (PREFIX_BYTES + 5)
#define ENTRY_SEQNO_AT (PREFIX_BYTES + HEADER_BYTES)

/* Flags of the form in which a client gets changes: vbucket/store/block.py and runs.py. */
#define ONLY_RAW 0x04
#define ONLY_UNPACKED 0x08
#define STRIPPED 0x20
#define UNPREFIXED 0x40
#define HAS_SNAPSHOT_ENDS 0x100
#define ANY_COLLECTION 0x200
#define PASSES_ALL 2       /* of a stream: dcp/stream/filter.py */
#define FIRST_COLLECTION 8 /* from here on it is the id of the one that passes */
#define LEB128_BYTES_MAX 5
#define DATATYPE_SNAPPY 0x02
#define DATATYPE_XATTR 0x04

enum { /* of a stream */
    VB_ID, OPAQUE, NEXT_SEQNO, END_SEQNO, SNAP_START_SEQNO, HELD_SEQNO, LIMIT_SEQNO,
    SNAP_END_SEQNO, IS_BACKLOG, PASSES, TAKEOVER, RATE, FRAMING, STREAM_STATE, STREAM_UUID,
    STREAM_ATTRIBUTES
};

static const char *const stream_names[STREAM_ATTRIBUTES] = {
    "vb_id", "opaque", "next_seqno", "end_seqno", "snap_start_seqno", "held_seqno", "limit_seqno",
    "snap_end_seqno", "is_backlog", "passes", "takeover", "rate", "framing", "state", "vb_uuid",
};

enum { COMMITTED_SEQNO, HISTORY_FLOOR, BRANCH_GROUP, PURGE_SEQNO, ACTIVE, TALLY, HAS_COPIES,
       PART_STATE, PART_UUID, HIGH_SEQNO, INCOMPLETE_SNAPSHOT, PART_ATTRIBUTES };

static const char *const part_names[PART_ATTRIBUTES] = {
    "committed_seqno", "history_floor", "branch_group", "purge_seqno", "active", "tally",
    "has_copies", "state", "vb_uuid", "high_seqno", "incomplete_snapshot",
};

/* A snapshot that was sent, for the next stream that gets the same. */
typedef struct {
    PyObject *message, *last_entry; /* NULL: none */
    uint64_t first_seqno, start_seqno, form, passes, opaque;
} Cut;

/* What is asked for in one turn of a connection. */
typedef struct {
    PyObject *partitions;
    uint64_t committed_group, form;
    Py_ssize_t bytes_max, turn_bytes;
    /* Of the pending cut, as it keeps them: where streams stop, those that are not
       there yet, and those that wait there. NULL: there is none. */
    PyObject *limits, *behind, *waiting;
} Turn;

typedef struct {
    PyObject_HEAD
    PyTypeObject *stream, *part, *layer, *tally; /* their classes */
    Attribute of_stream[STREAM_ATTRIBUTES], of_part[PART_ATTRIBUTES];
    Attribute entries, other_high_seqno;
    PyObject *caught_up, *waits_for_cut, *replica; /* of streams, of a partition: states */
    Cut cuts[CUTS];
    size_t cuts_bytes;
} LiveRun;

/* A snapshot, as it is sent. */
typedef struct {
    uint64_t vb_id, opaque, first_seqno, start_seqno, end_seqno;
    uint64_t form, passes; /* as a whole: 0 is nothing */
    uint8_t key_start[LEB128_BYTES_MAX]; /* of the keys that are shown */
    size_t key_start_bytes;              /* 0: all are */
    uint64_t shown_seqno;                /* the last one that is shown; 0: none is */
    int is_copy;                         /* of another node's partition */
    PyObject *entries;     /* a reference of its own */
    PyObject *last_entry;
    Py_ssize_t low; /* the index of its first change */
    size_t bytes;
    uint64_t limit_seqno; /* of the pending cut */
    int has_more;         /* is committed beyond it */
} Snapshot;

/* The functions below return 1, 0 with an exception, or -1 for what is for Python. */

/* Whether an attribute of a stream is this object. */
static int is_it(const LiveRun *self, PyObject *stream, int attribute, PyObject *it)
{
    PyObject *value = attribute_get(&self->of_stream[attribute], stream);
    Py_XDECREF(value);
    return value == NULL ? 0 : value == it ? 1 : -1;
}

/* Whether the stream is between two snapshots, live, and has nothing of its own. */
static int is_plain(const LiveRun *self, PyObject *stream)
{
    const struct { int attribute; PyObject *value; } needed[] = {
        {SNAP_END_SEQNO, Py_None}, {IS_BACKLOG, Py_False}, {TAKEOVER, Py_None}, {RATE, Py_None},
    };
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
        int outcome = is_it(self, stream, needed[i].attribute, needed[i].value);
        if (outcome != 1)
            return outcome;
    }
    PyObject *framing = attribute_get(&self->of_stream[FRAMING], stream);
    int is_empty = framing != NULL && PyBytes_CheckExact(framing) && !PyBytes_GET_SIZE(framing);
    Py_XDECREF(framing);
    return framing == NULL ? 0 : is_empty ? 1 : -1;
}

/* Notes how the keys of the one collection begin that passes, if it is one: its id as LEB128. */
static void note_collection(Snapshot *snapshot)
{
    uint64_t left = snapshot->passes;
    snapshot->key_start_bytes = 0;
    if (left < FIRST_COLLECTION || left > UINT32_MAX)
        return;
    for (; left; left >>= 7)
        snapshot->key_start[snapshot->key_start_bytes++] = (uint8_t)(left & 0x7F) |
                                                           (left > 0x7F ? 0x80 : 0);
}

/* Reads the numbers of a stream, if anything passes its filter as a whole. */
static int read_stream(const LiveRun *self, PyObject *stream, Snapshot *snapshot, uint64_t *end)
{
    const struct { int attribute; uint64_t *to; } numbers[] = {
        {VB_ID, &snapshot->vb_id}, {OPAQUE, &snapshot->opaque},
        {NEXT_SEQNO, &snapshot->first_seqno}, {SNAP_START_SEQNO, &snapshot->start_seqno},
        {PASSES, &snapshot->passes}, {END_SEQNO, end},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (!attribute_get_number(&self->of_stream[numbers[i].attribute], stream, numbers[i].to))
            return 0;
    note_collection(snapshot);
    return snapshot->passes ? 1 : -1;
}

/* Whether a copy of another node's partition still has what the stream goes on with
   (SnapshotWriter.may_go_on). */
static int may_go_on(const LiveRun *self, PyObject *stream, PyObject *part,
                     const Snapshot *snapshot)
{
    uint64_t stream_uuid, part_uuid, high;
    if (!attribute_get_number(&self->of_stream[STREAM_UUID], stream, &stream_uuid) ||
        !attribute_get_number(&self->of_part[PART_UUID], part, &part_uuid) ||
        !attribute_get_number(&self->of_part[HIGH_SEQNO], part, &high))
        return 0;
    PyObject *incomplete = attribute_get(&self->of_part[INCOMPLETE_SNAPSHOT], part);
    int is_whole = incomplete == Py_None;
    Py_XDECREF(incomplete);
    if (incomplete == NULL)
        return 0;
    return is_whole && stream_uuid == part_uuid && snapshot->first_seqno <= high + 1 ? 1 : -1;
}

/* Whether the stream may read the partition: of a master, or of a copy that has all. */
static int may_read(const LiveRun *self, PyObject *stream, PyObject *part, Snapshot *snapshot)
{
    PyObject *has_copies = attribute_get(&self->of_part[HAS_COPIES], part);
    PyObject *state = has_copies != NULL ? attribute_get(&self->of_part[PART_STATE], part) : NULL;
    snapshot->is_copy = has_copies == Py_True && state == self->replica;
    Py_XDECREF(has_copies);
    Py_XDECREF(state);
    if (state == NULL)
        return 0;
    return snapshot->is_copy ? may_go_on(self, stream, part, snapshot) : 1;
}

/* Takes from the pending cut where the stream has to stop. */
static int read_limit(const Turn *turn, Snapshot *snapshot)
{
    snapshot->limit_seqno = UINT64_MAX;
    if (turn->limits == NULL)
        return 1;
    if (snapshot->vb_id >= (uint64_t)PyList_GET_SIZE(turn->limits))
        return -1;
    PyObject *limit = PyList_GET_ITEM(turn->limits, (Py_ssize_t)snapshot->vb_id);
    snapshot->limit_seqno = PyLong_AsUnsignedLongLong(limit);
    return !PyErr_Occurred();
}

/* Takes the end of the snapshot from the partition, if the stream may send now. It ends before its
   first change where the stream is at the cut already. */
static int read_part(const LiveRun *self, PyObject *part, Snapshot *snapshot, uint64_t end,
                     uint64_t committed_group)
{
    uint64_t committed, floor, branch, purge, other_high;
    if (!attribute_get_number(&self->of_part[COMMITTED_SEQNO], part, &committed) ||
        !attribute_get_number(&self->of_part[HISTORY_FLOOR], part, &floor) ||
        !attribute_get_number(&self->of_part[BRANCH_GROUP], part, &branch) ||
        !attribute_get_number(&self->of_part[PURGE_SEQNO], part, &purge))
        return 0;
    PyObject *tally = attribute_get(&self->of_part[TALLY], part);
    if (tally == NULL)
        return 0;
    int is_read = Py_IS_TYPE(tally, self->tally)
                      ? attribute_get_number(&self->other_high_seqno, tally, &other_high)
                      : -1;
    Py_DECREF(tally);
    if (is_read != 1)
        return is_read;
    uint64_t next = snapshot->first_seqno, limit = snapshot->limit_seqno;
    /* A copy may have events of collections that its node does not know yet. */
    int knows_all = (snapshot->form & ANY_COLLECTION) && !snapshot->is_copy;
    int may_take = snapshot->key_start_bytes ? knows_all
                                             : other_high < next ||
                                                   (snapshot->passes == PASSES_ALL && knows_all);
    snapshot->has_more = committed > limit;
    snapshot->end_seqno = snapshot->has_more ? limit : committed;
    int may_send = next <= committed && committed < end && floor < next && purge < next &&
                   may_take && branch <= committed_group &&
                   (limit < next || snapshot->end_seqno - next < CHANGES_MAX);
    return may_send ? 1 : -1;
}

/* Whether an entry is a mutation of a collection that is shown. */
static int is_shown(const Snapshot *snapshot, PyObject *entry)
{
    size_t bytes = snapshot->key_start_bytes;
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(entry);
    return (size_t)PyBytes_GET_SIZE(entry) >= MUTATION_BYTES_MIN - 1 + bytes &&
           memcmp(at + MUTATION_BYTES_MIN - 1, snapshot->key_start, bytes) == 0;
}

/* Whether an entry is the mutation of this seqno, and left out, or of a key that has no older
   version in the snapshot, and in a form that the client gets. Adds the bytes of what is shown. */
static int is_sent_plain(Snapshot *snapshot, PyObject *entry, uint64_t seqno)
{
    if (!PyBytes_CheckExact(entry) || PyBytes_GET_SIZE(entry) < MUTATION_BYTES_MIN)
        return 0;
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(entry);
    if (at[ENTRY_OPCODE_AT] != MUTATION || be64(at + ENTRY_SEQNO_AT) != seqno)
        return 0;
    if (!is_shown(snapshot, entry))
        return 1;
    snapshot->shown_seqno = seqno;
    uint8_t refused = snapshot->form & ONLY_RAW ? 0xFF : 0;
    refused |= snapshot->form & ONLY_UNPACKED ? DATATYPE_SNAPPY : 0;
    refused |= snapshot->form & STRIPPED ? DATATYPE_XATTR : 0;
    snapshot->bytes += (size_t)PyBytes_GET_SIZE(entry) - PREFIX_BYTES;
    if (snapshot->form & UNPREFIXED)
        snapshot->bytes--;
    return !(at[ENTRY_DATATYPE_AT] & refused) && be64(at) < snapshot->first_seqno;
}

/* Finds the changes in the active layer. */
static int find_changes(const LiveRun *self, PyObject *part, Snapshot *snapshot)
{
    PyObject *layer = attribute_get(&self->of_part[ACTIVE], part);
    if (layer == NULL)
        return 0;
    if (Py_IS_TYPE(layer, self->layer))
        snapshot->entries = attribute_get(&self->entries, layer);
    int is_layer = Py_IS_TYPE(layer, self->layer);
    Py_DECREF(layer);
    if (!is_layer)
        return -1;
    if (snapshot->entries == NULL)
        return 0;
    if (!PyList_CheckExact(snapshot->entries) || !PyList_GET_SIZE(snapshot->entries))
        return -1;
    PyObject *first = PyList_GET_ITEM(snapshot->entries, 0);
    if (!PyBytes_CheckExact(first) || PyBytes_GET_SIZE(first) < MUTATION_BYTES_MIN)
        return -1;
    uint64_t low = be64((const uint8_t *)PyBytes_AS_STRING(first) + ENTRY_SEQNO_AT);
    uint64_t count = (uint64_t)PyList_GET_SIZE(snapshot->entries);
    if (snapshot->first_seqno < low || snapshot->end_seqno - low >= count)
        return -1;
    snapshot->low = (Py_ssize_t)(snapshot->first_seqno - low);
    snapshot->last_entry = PyList_GET_ITEM(snapshot->entries,
                                           (Py_ssize_t)(snapshot->end_seqno - low));
    return 1;
}

/* Whether the client gets all changes as they are. Adds up the bytes of the snapshot. */
static int are_sent_plain(Snapshot *snapshot)
{
    snapshot->bytes = MARKER_BYTES;
    if (snapshot->form & HAS_SNAPSHOT_ENDS)
        snapshot->bytes += SNAPSHOT_END_BYTES;
    Py_ssize_t at = snapshot->low;
    for (uint64_t seqno = snapshot->first_seqno; seqno <= snapshot->end_seqno; seqno++, at++)
        if (!is_sent_plain(snapshot, PyList_GET_ITEM(snapshot->entries, at), seqno))
            return 0;
    if (snapshot->shown_seqno != snapshot->end_seqno)
        snapshot->bytes += ADVANCED_BYTES;
    return 1;
}

static uint8_t *write_head(uint8_t *at, const Snapshot *snapshot, uint8_t opcode, uint8_t extras)
{
    memset(at, 0, HEADER_BYTES);
    at[0] = 0x80;
    at[1] = opcode;
    at[4] = at[11] = extras;
    put_be(at + 6, snapshot->vb_id, 2);
    put_be(at + 12, snapshot->opaque, 4);
    return at + HEADER_BYTES;
}

static uint8_t *write_change(uint8_t *at, const Snapshot *snapshot, PyObject *entry)
{
    const uint8_t *frame = (const uint8_t *)PyBytes_AS_STRING(entry) + PREFIX_BYTES;
    size_t bytes = (size_t)PyBytes_GET_SIZE(entry) - PREFIX_BYTES;
    size_t before_key = HEADER_BYTES + MUTATION_EXTRAS_BYTES;
    size_t cut = snapshot->form & UNPREFIXED ? 1 : 0;
    memcpy(at, frame, before_key);
    put_be(at + 2, be16(frame + 2) - cut, 2);
    put_be(at + 8, be32(frame + 8) - cut, 4);
    put_be(at + 12, snapshot->opaque, 4);
    memcpy(at + before_key, frame + before_key + cut, bytes - before_key - cut);
    return at + bytes - cut;
}

/* Returns marker, changes and end. */
static PyObject *written(const Snapshot *snapshot)
{
    PyObject *message = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)snapshot->bytes);
    if (message == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(message);
    at = write_head(at, snapshot, SNAPSHOT_MARKER, MARKER_BYTES - HEADER_BYTES);
    put_be(at, snapshot->start_seqno, 8);
    put_be(at + 8, snapshot->end_seqno, 8);
    put_be(at + 16, MEMORY, 4);
    at += MARKER_BYTES - HEADER_BYTES;
    uint64_t count = snapshot->end_seqno - snapshot->first_seqno + 1;
    for (uint64_t i = 0; i < count; i++) {
        PyObject *entry = PyList_GET_ITEM(snapshot->entries, snapshot->low + (Py_ssize_t)i);
        if (is_shown(snapshot, entry))
            at = write_change(at, snapshot, entry);
    }
    if (snapshot->shown_seqno != snapshot->end_seqno) {
        at = write_head(at, snapshot, SEQNO_ADVANCED, ADVANCED_BYTES - HEADER_BYTES);
        put_be(at, snapshot->end_seqno, 8);
        at += ADVANCED_BYTES - HEADER_BYTES;
    }
    if (snapshot->form & HAS_SNAPSHOT_ENDS) {
        at = write_head(at, snapshot, SNAPSHOT_END, SNAPSHOT_END_BYTES - HEADER_BYTES);
        put_be(at, snapshot->end_seqno, 8);
    }
    return message;
}

/* Moves the stream behind the snapshot. */
static int move_on(const LiveRun *self, PyObject *stream, const Snapshot *snapshot)
{
    PyObject *next = PyLong_FromUnsignedLongLong(snapshot->end_seqno + 1);
    PyObject *end = PyLong_FromUnsignedLongLong(snapshot->end_seqno);
    PyObject *held = PyLong_FromUnsignedLongLong(snapshot->first_seqno - 1);
    int is_moved = next != NULL && end != NULL && held != NULL &&
                   attribute_set(&self->of_stream[NEXT_SEQNO], stream, next) &&
                   attribute_set(&self->of_stream[SNAP_START_SEQNO], stream, next) &&
                   attribute_set(&self->of_stream[LIMIT_SEQNO], stream, end) &&
                   attribute_set(&self->of_stream[HELD_SEQNO], stream, held);
    Py_XDECREF(next);
    Py_XDECREF(end);
    Py_XDECREF(held);
    return is_moved;
}

/* Tells what the stream waits for now: the next commit, or the others at the cut. */
static int rest(const LiveRun *self, PyObject *stream, const Turn *turn, const Snapshot *snapshot)
{
    if (snapshot->limit_seqno <= snapshot->end_seqno &&
        PySet_Discard(turn->behind, stream) < 0)
        return 0;
    if (!snapshot->has_more)
        return attribute_set(&self->of_stream[STREAM_STATE], stream, self->caught_up);
    return PyList_Append(turn->waiting, stream) == 0 &&
           attribute_set(&self->of_stream[STREAM_STATE], stream, self->waits_for_cut);
}

/* Returns a message with the opaque of another stream. */
static PyObject *with_opaque(PyObject *message, uint64_t opaque)
{
    Py_ssize_t bytes = PyBytes_GET_SIZE(message);
    PyObject *copy = PyBytes_FromStringAndSize(PyBytes_AS_STRING(message), bytes);
    if (copy == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(copy), *end = at + bytes;
    for (; at < end; at += HEADER_BYTES + be32(at + 8))
        put_be(at + 12, opaque, 4);
    return copy;
}

static void forget_cuts(LiveRun *self)
{
    for (size_t i = 0; i < CUTS; i++) {
        Py_CLEAR(self->cuts[i].message);
        Py_CLEAR(self->cuts[i].last_entry);
    }
    self->cuts_bytes = 0;
}

/* Keeps a snapshot in the place of one before. */
static void keep_cut(LiveRun *self, Cut *cut, const Snapshot *snapshot, PyObject *message)
{
    if (self->cuts_bytes + snapshot->bytes > CUTS_BYTES_MAX)
        forget_cuts(self);
    if (cut->message != NULL)
        self->cuts_bytes -= (size_t)PyBytes_GET_SIZE(cut->message);
    self->cuts_bytes += snapshot->bytes;
    Py_XSETREF(cut->message, Py_NewRef(message));
    Py_XSETREF(cut->last_entry, Py_NewRef(snapshot->last_entry));
    cut->first_seqno = snapshot->first_seqno;
    cut->start_seqno = snapshot->start_seqno;
    cut->form = snapshot->form;
    cut->passes = snapshot->key_start_bytes ? snapshot->passes : 0;
    cut->opaque = snapshot->opaque;
}

/* Makes the message of a snapshot, or takes that of another stream. */
static int cut_message(LiveRun *self, Snapshot *snapshot, Py_ssize_t bytes_max, PyObject **message)
{
    Cut *cut = &self->cuts[snapshot->vb_id % CUTS];
    int is_known = cut->last_entry == snapshot->last_entry &&
                   cut->first_seqno == snapshot->first_seqno &&
                   cut->start_seqno == snapshot->start_seqno && cut->form == snapshot->form &&
                   cut->passes == (snapshot->key_start_bytes ? snapshot->passes : 0);
    if (is_known)
        snapshot->bytes = (size_t)PyBytes_GET_SIZE(cut->message);
    else if (!are_sent_plain(snapshot))
        return -1;
    if (bytes_max <= 0 || snapshot->bytes >= (size_t)bytes_max)
        return -1;
    if (!is_known)
        *message = written(snapshot);
    else if (cut->opaque == snapshot->opaque)
        *message = Py_NewRef(cut->message);
    else
        *message = with_opaque(cut->message, snapshot->opaque);
    if (*message == NULL)
        return 0;
    if (!is_known)
        keep_cut(self, cut, snapshot, *message);
    return 1;
}

/* Sends one stream's snapshot; adds its message to `out`. */
static int send(LiveRun *self, PyObject *stream, const Turn *turn, Snapshot *snapshot,
                PyObject *out)
{
    uint64_t end = 0;
    int outcome = is_plain(self, stream);
    if (outcome == 1)
        outcome = read_stream(self, stream, snapshot, &end);
    if (outcome != 1)
        return outcome;
    if (snapshot->vb_id >= (uint64_t)PyList_GET_SIZE(turn->partitions))
        return -1;
    PyObject *part = PyList_GET_ITEM(turn->partitions, (Py_ssize_t)snapshot->vb_id);
    if (!Py_IS_TYPE(part, self->part))
        return -1;
    outcome = may_read(self, stream, part, snapshot);
    if (outcome == 1)
        outcome = read_limit(turn, snapshot);
    if (outcome == 1)
        outcome = read_part(self, part, snapshot, end, turn->committed_group);
    if (outcome == 1 && snapshot->limit_seqno < snapshot->first_seqno)
        return rest(self, stream, turn, snapshot);
    if (outcome == 1)
        outcome = find_changes(self, part, snapshot);
    Py_ssize_t room = turn->bytes_max < turn->turn_bytes ? turn->bytes_max : turn->turn_bytes;
    PyObject *message = NULL;
    if (outcome == 1)
        outcome = cut_message(self, snapshot, room, &message);
    if (outcome == 1)
        outcome = PyList_Append(out, message) == 0 && move_on(self, stream, snapshot) &&
                  rest(self, stream, turn, snapshot);
    Py_XDECREF(message);
    Py_XDECREF(snapshot->entries);
    return outcome;
}

static PyObject *live_run_send(LiveRun *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 8 || !PyList_CheckExact(args[1]) || !PyList_CheckExact(args[6])) {
        PyErr_SetString(PyExc_TypeError,
                        "send() takes streams, partitions, numbers, a list and a cut");
        return NULL;
    }
    PyObject *ready = args[0], *out = args[6];
    Turn turn = {args[1], PyLong_AsUnsignedLongLong(args[2]), PyLong_AsUnsignedLongLong(args[5]),
                 PyLong_AsSsize_t(args[3]), PyLong_AsSsize_t(args[4]), NULL, NULL, NULL};
    if (args[7] != Py_None &&
        !PyArg_ParseTuple(args[7], "O!O!O!", &PyList_Type, &turn.limits, &PySet_Type, &turn.behind,
                          &PyList_Type, &turn.waiting))
        return NULL;
    Py_ssize_t left = PySequence_Size(ready), sent = 0;
    unsigned long long seqnos = 0;
    if (left < 0 || PyErr_Occurred())
        return NULL;
    for (; left > 0 && turn.bytes_max > 0; left--) {
        PyObject *stream = PySequence_GetItem(ready, 0);
        if (stream == NULL)
            return NULL;
        Snapshot snapshot = {.form = turn.form};
        int outcome = Py_IS_TYPE(stream, self->stream) ? send(self, stream, &turn, &snapshot, out)
                                                       : -1;
        Py_DECREF(stream);
        if (outcome == -1)
            break;
        if (outcome == 0 || PySequence_DelItem(ready, 0))
            return NULL;
        if (snapshot.limit_seqno < snapshot.first_seqno)
            continue; /* it was there already */
        turn.bytes_max -= (Py_ssize_t)snapshot.bytes;
        sent += (Py_ssize_t)snapshot.bytes;
        seqnos += snapshot.end_seqno - snapshot.first_seqno + 1;
    }
    return Py_BuildValue("nK", sent, seqnos);
}

static int resolve(PyTypeObject **type, PyObject *class, Attribute *attributes,
                   const char *const *names, int count)
{
    if (!PyType_Check(class)) {
        PyErr_SetString(PyExc_TypeError, "LiveRun() takes classes");
        return 0;
    }
    for (int i = 0; i < count; i++)
        attributes[i].name = names[i];
    *type = (PyTypeObject *)Py_NewRef(class);
    return attributes_resolve(attributes, count, *type);
}

static PyObject *live_run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const entries[] = {"entries"}, *const other_high[] = {"other_high_seqno"};
    PyObject *stream, *part, *layer, *tally, *caught_up, *waits_for_cut, *replica;
    if (!has_no_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "OOOOOOO", &stream, &part, &layer, &tally, &caught_up,
                          &waits_for_cut, &replica))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    LiveRun *self = (LiveRun *)allocate(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->caught_up = Py_NewRef(caught_up);
    self->waits_for_cut = Py_NewRef(waits_for_cut);
    self->replica = Py_NewRef(replica);
    if (!resolve(&self->stream, stream, self->of_stream, stream_names, STREAM_ATTRIBUTES) ||
        !resolve(&self->part, part, self->of_part, part_names, PART_ATTRIBUTES) ||
        !resolve(&self->layer, layer, &self->entries, entries, 1) ||
        !resolve(&self->tally, tally, &self->other_high_seqno, other_high, 1))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void live_run_dealloc(LiveRun *self)
{
    PyTypeObject *type = Py_TYPE(self), *all[] = {self->stream, self->part, self->layer,
                                                  self->tally};
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        Py_XDECREF(all[i]);
    Py_XDECREF(self->caught_up);
    Py_XDECREF(self->waits_for_cut);
    Py_XDECREF(self->replica);
    forget_cuts(self);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"send", (PyCFunction)(void (*)(void))live_run_send, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, live_run_new},
    {Py_tp_dealloc, live_run_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec live_run_spec = {
    .name = "vbucket.native.loops.LiveRun",
    .basicsize = sizeof(LiveRun),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
