/* See staging.h. Who calls it: vbucket/upkeep/merge.py. vbucket/native/loops.pyi has the interface.

   Invariants
   - every staged entry lies within one of `payloads`, which are held until the object goes;
   - `lines` are the newest entries of the keys of partition `lines_vb`, ascending by key. They hold
     from `newest` to the next call of any method: `merge` makes them point into its arguments, and
     an entry that is added later was not checked;
   - `newest` and `merge` change nothing outside. Whatever they do not know, or find damaged, makes
     them return None; then Python does the work, and names what is wrong. */

#include "staging.h"

#include "blocks.h"
#include "counts.h"
#include "crc32c.h"

#include <string.h>

#define PARTITIONS 1024
#define LOG_CONTROL 0xF0
#define HEAD_BYTES 36 /* of an entry, before its extras */
#define MUTATION_HEAD_BYTES 67
#define REMOVAL_HEAD_BYTES 54 /* of a deletion; an expiration has more */
#define OPCODE_AT 13
#define KEY_LENGTH_AT 14
#define EXTRAS_LENGTH_AT 16
#define DATATYPE_AT 17
#define VB_AT 18
#define BODY_LENGTH_AT 20
#define CAS_AT 28
#define SEQNO_AT 36
#define EXPIRY_AT 56
#define RECORD_BYTES 38 /* of by_key: vbucket/store/key_record.py */
#define RECORD_SEQNO_AT 10
#define RECORD_CRC_AT 34
#define RECORD_EXPIRY_AT 30
#define REMOVAL_NUMBERS 24 /* CAS, seqno and revision: a removal has no flags and no expiry */
#define MUTATION_NUMBERS 32
#define FULL_KEY_BYTES_MAX 511 /* LMDB's limit */

typedef struct {
    const uint8_t *data;
    uint32_t bytes;
} Entry;

typedef struct {
    Entry *entries;
    size_t count, room;
    int is_open;
} Stage;

/* A key and its newest entry. */
typedef struct {
    uint64_t head; /* the first bytes in which keys differ */
    const uint8_t *key;
    const uint8_t *old; /* its record in the store, or NULL */
    uint64_t replaced;  /* the seqno that the key's oldest entry replaces; 0: none */
    uint32_t key_bytes, entry;
} Line;

typedef struct {
    PyObject_HEAD
    PyObject *payloads;
    PyObject *keys; /* of `lines`, with the partition before each */
    Py_ssize_t entries;
    Line *lines;
    size_t lines_count, lines_room;
    long lines_vb;
    Stage stages[PARTITIONS];
} Staged;

static PyObject *staged_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, "") || (kwargs != NULL && PyDict_GET_SIZE(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "Staged() takes no arguments");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Staged *self = (Staged *)allocate(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->lines_vb = -1;
    self->payloads = PyList_New(0);
    self->keys = PyList_New(0);
    if (self->payloads == NULL || self->keys == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void staged_dealloc(Staged *self)
{
    for (int vb_id = 0; vb_id < PARTITIONS; vb_id++)
        PyMem_Free(self->stages[vb_id].entries);
    PyMem_Free(self->lines);
    Py_XDECREF(self->payloads);
    Py_XDECREF(self->keys);
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Returns the stage of a partition that is open, or NULL with ValueError set. */
static Stage *open_stage(Staged *self, PyObject *number, long *vb_id)
{
    *vb_id = PyLong_AsLong(number);
    if (*vb_id == -1 && PyErr_Occurred())
        return NULL;
    if (*vb_id < 0 || *vb_id >= PARTITIONS || !self->stages[*vb_id].is_open) {
        PyErr_Format(PyExc_ValueError, "partition %ld is not open", *vb_id);
        return NULL;
    }
    return &self->stages[*vb_id];
}

static PyObject *staged_open(Staged *self, PyObject *number)
{
    long vb_id = PyLong_AsLong(number);
    if (vb_id == -1 && PyErr_Occurred())
        return NULL;
    if (vb_id >= 0 && vb_id < PARTITIONS)
        self->stages[vb_id].is_open = 1;
    return PyBool_FromLong(vb_id >= 0 && vb_id < PARTITIONS);
}

static int push(Stage *stage, const uint8_t *data, uint32_t bytes)
{
    if (stage->count == stage->room) {
        size_t room = stage->room ? 2 * stage->room : 64;
        Entry *entries = PyMem_Realloc(stage->entries, room * sizeof(Entry));
        if (entries == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        stage->entries = entries;
        stage->room = room;
    }
    stage->entries[stage->count++] = (Entry){data, bytes};
    return 1;
}

static PyObject *staged_add(Staged *self, PyObject *args)
{
    PyObject *payload;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "Sn", &payload, &at))
        return NULL;
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(payload);
    Py_ssize_t bytes = PyBytes_GET_SIZE(payload);
    if (at < 0 || at > bytes) {
        PyErr_SetString(PyExc_ValueError, "the position is not within the payload");
        return NULL;
    }
    self->lines_vb = -1;
    Py_ssize_t held = PyList_GET_SIZE(self->payloads);
    if ((!held || PyList_GET_ITEM(self->payloads, held - 1) != payload) &&
        PyList_Append(self->payloads, payload) < 0)
        return NULL;
    while (at < bytes) {
        const uint8_t *entry = data + at;
        if (bytes - at < HEAD_BYTES)
            return PyLong_FromLong(-1);
        uint64_t size = HEAD_BYTES + (uint64_t)be32(entry + BODY_LENGTH_AT);
        if (size > (uint64_t)(bytes - at) || size > UINT32_MAX)
            return PyLong_FromLong(-1);
        uint32_t vb_id = be16(entry + VB_AT);
        if (entry[OPCODE_AT] == LOG_CONTROL || vb_id >= PARTITIONS ||
            !self->stages[vb_id].is_open)
            break;
        if (!push(&self->stages[vb_id], entry, (uint32_t)size))
            return NULL;
        self->entries++;
        at += (Py_ssize_t)size;
    }
    return PyLong_FromSsize_t(at);
}

static PyObject *staged_close(Staged *self, PyObject *number)
{
    long vb_id;
    Stage *stage = open_stage(self, number, &vb_id);
    PyObject *list = stage == NULL ? NULL : PyList_New((Py_ssize_t)stage->count);
    if (list == NULL)
        return NULL;
    for (size_t i = 0; i < stage->count; i++) {
        PyObject *entry = PyBytes_FromStringAndSize((const char *)stage->entries[i].data,
                                                    stage->entries[i].bytes);
        if (entry == NULL) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, entry);
    }
    PyMem_Free(stage->entries);
    *stage = (Stage){0};
    self->lines_vb = -1;
    return list;
}

/* Whether `newest` and `merge` know what to do with an entry: a change of a document that follows
   the seqno before and has the epoch of the others. */
static int is_plain(const Entry *entry, uint64_t seqno_before, uint32_t epoch)
{
    const uint8_t *data = entry->data;
    uint32_t key_bytes = be16(data + KEY_LENGTH_AT);
    uint32_t key_at = HEAD_BYTES + data[EXTRAS_LENGTH_AT];
    int is_mutation = data[OPCODE_AT] == MUTATION;
    if (!is_mutation && data[OPCODE_AT] != DELETION && data[OPCODE_AT] != EXPIRATION)
        return 0;
    return key_bytes > 0 && key_bytes + 2 <= FULL_KEY_BYTES_MAX &&
           key_at >= (is_mutation ? MUTATION_HEAD_BYTES : REMOVAL_HEAD_BYTES) &&
           key_at + key_bytes <= entry->bytes &&
           be64(data + SEQNO_AT) > seqno_before && be32(data + 8) == epoch;
}

static int compare_keys(const Line *one, const Line *other)
{
    if (one->head != other->head)
        return one->head < other->head ? -1 : 1;
    uint32_t shorter = one->key_bytes < other->key_bytes ? one->key_bytes : other->key_bytes;
    int order = memcmp(one->key, other->key, shorter);
    if (order)
        return order;
    return one->key_bytes == other->key_bytes ? 0 : one->key_bytes < other->key_bytes ? -1 : 1;
}

static int compare_lines(const void *one, const void *other)
{
    uint32_t first = ((const Line *)one)->entry, second = ((const Line *)other)->entry;
    int order = compare_keys(one, other);
    return order ? order : (first > second) - (first < second);
}

/* Makes a line for each entry. Returns 0 if not all are plain. */
static int make_lines(Staged *self, const Stage *stage)
{
    uint64_t seqno = 0;
    uint32_t epoch = be32(stage->entries[0].data + 8), same = UINT32_MAX;
    for (size_t i = 0; i < stage->count; i++) {
        const Entry *entry = &stage->entries[i];
        if (!is_plain(entry, seqno, epoch))
            return 0;
        seqno = be64(entry->data + SEQNO_AT);
        Line *line = &self->lines[i];
        line->entry = (uint32_t)i;
        line->old = NULL;
        line->key = entry->data + HEAD_BYTES + entry->data[EXTRAS_LENGTH_AT];
        line->key_bytes = be16(entry->data + KEY_LENGTH_AT);
        const Line *first = self->lines;
        uint32_t most = same < line->key_bytes ? same : line->key_bytes;
        for (same = 0; same < most && line->key[same] == first->key[same];)
            same++;
    }
    for (size_t i = 0; i < stage->count; i++) {
        Line *line = &self->lines[i];
        line->head = 0;
        for (uint32_t at = same; at < same + 8; at++)
            line->head = line->head << 8 | (at < line->key_bytes ? line->key[at] : 0);
    }
    return 1;
}

/* Keeps the newest line of each key, in the order of the keys. */
static void keep_newest(Staged *self, const Stage *stage, size_t count)
{
    size_t kept = 0, oldest = 0;
    qsort(self->lines, count, sizeof(Line), compare_lines);
    for (size_t i = 0; i < count; i++)
        if (i + 1 == count || compare_keys(&self->lines[i], &self->lines[i + 1])) {
            uint64_t replaced = be64(stage->entries[self->lines[oldest].entry].data);
            self->lines[kept] = self->lines[i];
            self->lines[kept++].replaced = replaced;
            oldest = i + 1;
        }
    self->lines_count = kept;
}

/* Whether a key had a version before its newest entry: otherwise it is not in the store. */
static int may_be_stored(const Stage *stage, const Line *line)
{
    return be64(stage->entries[line->entry].data) != 0;
}

static PyObject *staged_newest(Staged *self, PyObject *number)
{
    long vb_id;
    Stage *stage = open_stage(self, number, &vb_id);
    if (stage == NULL)
        return NULL;
    self->lines_vb = -1;
    if (stage->count > self->lines_room) {
        Line *lines = PyMem_Realloc(self->lines, stage->count * sizeof(Line));
        if (lines == NULL)
            return PyErr_NoMemory();
        self->lines = lines;
        self->lines_room = stage->count;
    }
    if (!stage->count || !make_lines(self, stage))
        Py_RETURN_NONE;
    keep_newest(self, stage, stage->count);
    PyObject *keys = PyList_New((Py_ssize_t)self->lines_count);
    PyObject *asked = PyList_New(0);
    int is_done = keys != NULL && asked != NULL;
    for (size_t i = 0; is_done && i < self->lines_count; i++) {
        const Line *line = &self->lines[i];
        PyObject *key = PyBytes_FromStringAndSize(NULL, 2 + (Py_ssize_t)line->key_bytes);
        is_done = key != NULL;
        if (is_done) {
            put_be((uint8_t *)PyBytes_AS_STRING(key), (uint64_t)vb_id, 2);
            memcpy(PyBytes_AS_STRING(key) + 2, line->key, line->key_bytes);
            PyList_SET_ITEM(keys, (Py_ssize_t)i, key);
            is_done = !may_be_stored(stage, line) || PyList_Append(asked, key) == 0;
        }
    }
    if (!is_done) {
        Py_XDECREF(keys);
        Py_XDECREF(asked);
        return NULL;
    }
    Py_SETREF(self->keys, keys);
    self->lines_vb = vb_id;
    return asked;
}

/* Notes the stored records. Returns 0 if one is damaged, or none of those that were asked for. */
static int take_old(Staged *self, PyObject *found)
{
    Py_ssize_t next = 0, count = PyList_GET_SIZE(found);
    for (size_t i = 0; i < self->lines_count && next < count; i++) {
        PyObject *pair = PyList_GET_ITEM(found, next), *key = PyList_GET_ITEM(self->keys, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
            return 0;
        PyObject *stored_key = PyTuple_GET_ITEM(pair, 0), *value = PyTuple_GET_ITEM(pair, 1);
        if (!PyBytes_Check(stored_key) || !PyBytes_Check(value))
            return 0;
        Py_ssize_t bytes = PyBytes_GET_SIZE(key);
        if (PyBytes_GET_SIZE(stored_key) != bytes ||
            memcmp(PyBytes_AS_STRING(stored_key), PyBytes_AS_STRING(key), (size_t)bytes) != 0)
            continue;
        const uint8_t *record = (const uint8_t *)PyBytes_AS_STRING(value);
        if (PyBytes_GET_SIZE(value) != RECORD_BYTES)
            return 0;
        uint32_t crc = crc32c(0, (const uint8_t *)PyBytes_AS_STRING(key), (size_t)bytes);
        if (crc32c(crc, record, RECORD_CRC_AT) != be32(record + RECORD_CRC_AT))
            return 0;
        self->lines[i].old = record;
        next++;
    }
    return next == count;
}

/* Whether the stored records are those that the entries replace. Python says what is wrong, or
   that it may be: a tombstone may have been purged. */
static int are_replaced(const Staged *self)
{
    for (size_t i = 0; i < self->lines_count; i++) {
        const Line *line = &self->lines[i];
        if (line->replaced != (line->old == NULL ? 0 : be64(line->old + RECORD_SEQNO_AT)))
            return 0;
    }
    return 1;
}

static void fill_record(uint8_t *record, const uint8_t *entry, PyObject *key)
{
    record[0] = entry[OPCODE_AT];
    record[1] = entry[DATATYPE_AT];
    memset(record + 2, 0, MUTATION_NUMBERS);
    memcpy(record + 2, entry + CAS_AT,
           entry[OPCODE_AT] == MUTATION ? MUTATION_NUMBERS : REMOVAL_NUMBERS);
    uint32_t crc = crc32c(0, (const uint8_t *)PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key));
    put_be(record + RECORD_CRC_AT, crc32c(crc, record, RECORD_CRC_AT), 4);
}

static uint32_t expiry_of(const uint8_t *record)
{
    return record != NULL && record[0] == MUTATION ? be32(record + RECORD_EXPIRY_AT) : 0;
}

/* Notes the changes outside of the default collection. Returns 0 for what Python should do. */
static int note_others(const Stage *stage, uint64_t seqno_before, Others *others)
{
    for (size_t i = 0; i < stage->count; i++) {
        const uint8_t *data = stage->entries[i].data;
        const uint8_t *key = data + HEAD_BYTES + data[EXTRAS_LENGTH_AT];
        uint64_t seqno = be64(data + SEQNO_AT);
        if (key[0]) {
            Collection *collection = collection_of(others, key, be16(data + KEY_LENGTH_AT));
            if (collection == NULL)
                return 0;
            if (others->other_high_seqno != seqno_before)
                others->default_high_seqno = seqno_before;
            others->other_high_seqno = collection->high_seqno = seqno;
        }
        seqno_before = seqno;
    }
    return 1;
}

/* Appends (key, record) of each line to `items`, and to `expiries` (key, old expiry, new expiry)
   where it changes. Counts keys, and documents: those of the default collection, and in `others`.
   Returns 1, 0 with an exception, or -1 for what Python should do. */
static int add_records(Staged *self, const Stage *stage, PyObject *items, PyObject *expiries,
                       Py_ssize_t *more_keys, Py_ssize_t *documents, Others *others)
{
    for (size_t i = 0; i < self->lines_count; i++) {
        const Line *line = &self->lines[i];
        PyObject *key = PyList_GET_ITEM(self->keys, (Py_ssize_t)i);
        PyObject *value = PyBytes_FromStringAndSize(NULL, RECORD_BYTES);
        if (value == NULL)
            return 0;
        uint8_t *record = (uint8_t *)PyBytes_AS_STRING(value);
        fill_record(record, stage->entries[line->entry].data, key);
        uint32_t before = expiry_of(line->old), after = expiry_of(record);
        *more_keys += line->old == NULL;
        int more = (record[0] == MUTATION) - (line->old != NULL && line->old[0] == MUTATION);
        Py_ssize_t *count = documents;
        if (more && line->key[0]) {
            Collection *collection = collection_of(others, line->key, line->key_bytes);
            count = collection == NULL ? NULL : &collection->documents;
        }
        if (count == NULL) {
            Py_DECREF(value);
            return -1;
        }
        *count += more;
        PyObject *pair = PyTuple_Pack(2, key, value);
        Py_DECREF(value);
        if (pair == NULL)
            return 0;
        PyList_SET_ITEM(items, (Py_ssize_t)i, pair);
        if (before != after) {
            PyObject *change = Py_BuildValue("OII", key, before, after);
            int is_added = change != NULL && PyList_Append(expiries, change) == 0;
            Py_XDECREF(change);
            if (!is_added)
                return 0;
        }
    }
    return 1;
}

/* Adds the entries as blocks. Returns 1, 0 with an exception, or -1 for what Python should do. */
static int add_blocks(const Stage *stage, PyObject *blocks, uint32_t vb_id, PyObject *tail,
                      uint64_t last_seqno, size_t target, uint64_t *max_cas)
{
    Block block;
    uint64_t seqno_before = 0, tail_last = 0;
    uint32_t epoch = be32(stage->entries[0].data + 8);
    Versions versions = {NULL, 0, 0};
    int is_open = tail != Py_None;
    if (is_open) {
        PyObject *key = PyTuple_GET_ITEM(tail, 0), *value = PyTuple_GET_ITEM(tail, 1);
        if (!block_open(&block, (const uint8_t *)PyBytes_AS_STRING(key),
                        (size_t)PyBytes_GET_SIZE(key), (const uint8_t *)PyBytes_AS_STRING(value),
                        (size_t)PyBytes_GET_SIZE(value)))
            return -1;
        seqno_before = tail_last = block.last_seqno;
    }
    if (tail_last != last_seqno || be64(stage->entries[0].data + SEQNO_AT) <= last_seqno)
        return -1;
    if (is_open && block.epoch == epoch &&
        block.body_bytes + stage->entries[0].bytes - PREFIX_BYTES <= target) {
        if (!block_body_is_sound(&block))
            return -1;
        if (!versions_add_block(&versions, &block, NULL))
            return 0;
        seqno_before = block.seqno_before;
    }
    int is_done = versions_reserve(&versions, stage->count);
    for (size_t i = 0; is_done && i < stage->count; i++) {
        const Entry *entry = &stage->entries[i];
        Version *version = &versions.items[versions.count++];
        uint64_t cas = be64(entry->data + CAS_AT);
        if (cas > *max_cas)
            *max_cas = cas;
        version->frame = entry->data + PREFIX_BYTES;
        version->bytes = entry->bytes - PREFIX_BYTES;
        version->crc = crc32c(0, version->frame, version->bytes);
        version->prev_seqno = be64(entry->data);
        version->seqno = be64(entry->data + SEQNO_AT);
    }
    is_done = is_done && blocks_build(blocks, &versions, vb_id, epoch, seqno_before, target);
    PyMem_Free(versions.items);
    return is_done;
}

static int is_pair_of_bytes(PyObject *pair)
{
    return PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2 &&
           PyBytes_Check(PyTuple_GET_ITEM(pair, 0)) && PyBytes_Check(PyTuple_GET_ITEM(pair, 1));
}

static PyObject *staged_merge(Staged *self, PyObject *args)
{
    PyObject *number, *found, *tail;
    unsigned long long last_seqno, target, other_high, default_high;
    if (!PyArg_ParseTuple(args, "OO!OKKKK", &number, &PyList_Type, &found, &tail, &last_seqno,
                          &target, &other_high, &default_high))
        return NULL;
    long vb_id;
    Stage *stage = open_stage(self, number, &vb_id);
    if (stage == NULL)
        return NULL;
    if (self->lines_vb != vb_id || (tail != Py_None && !is_pair_of_bytes(tail))) {
        PyErr_SetString(PyExc_ValueError, "merge() comes after newest(); a tail is key and value");
        return NULL;
    }
    self->lines_vb = -1; /* they will point into `found` */
    Py_ssize_t more_keys = 0, documents = 0;
    uint64_t max_cas = 0;
    Others others = {.other_high_seqno = other_high, .default_high_seqno = default_high};
    if (!take_old(self, found) || !are_replaced(self))
        Py_RETURN_NONE;
    PyObject *items = PyList_New((Py_ssize_t)self->lines_count);
    PyObject *blocks = PyList_New(0), *expiries = PyList_New(0);
    int outcome = items != NULL && blocks != NULL && expiries != NULL;
    if (outcome == 1)
        outcome = add_records(self, stage, items, expiries, &more_keys, &documents, &others);
    if (outcome == 1 && !note_others(stage, last_seqno, &others))
        outcome = -1;
    if (outcome == 1)
        outcome = add_blocks(stage, blocks, (uint32_t)vb_id, tail, last_seqno, target, &max_cas);
    PyObject *result = NULL, *rows = outcome == 1 ? others_tuple(&others) : NULL;
    if (rows != NULL)
        result = Py_BuildValue("OOOnnKKnN", items, blocks, expiries, more_keys, documents,
                               (unsigned long long)be64(stage->entries[stage->count - 1].data +
                                                        SEQNO_AT),
                               (unsigned long long)max_cas, (Py_ssize_t)stage->count, rows);
    else if (outcome == -1)
        result = Py_NewRef(Py_None);
    Py_XDECREF(items);
    Py_XDECREF(blocks);
    Py_XDECREF(expiries);
    return result;
}

static PyObject *staged_entries(Staged *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(self->entries);
}

static PyMethodDef methods[] = {
    {"open", (PyCFunction)staged_open, METH_O, NULL},
    {"add", (PyCFunction)staged_add, METH_VARARGS, NULL},
    {"close", (PyCFunction)staged_close, METH_O, NULL},
    {"newest", (PyCFunction)staged_newest, METH_O, NULL},
    {"merge", (PyCFunction)staged_merge, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"entries", (getter)staged_entries, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, staged_new},   {Py_tp_dealloc, staged_dealloc}, {Py_tp_methods, methods},
    {Py_tp_getset, getters},   {0, NULL},
};

PyType_Spec staged_spec = {
    .name = "vbucket.native.loops.Staged",
    .basicsize = sizeof(Staged),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
