/* See replay_run.h. vbucket/native/loops.pyi has the interface. engine/recovery/replay.py calls it,
   and has its twin in Python.

   Invariants
   - no byte outside of the payload is read;
   - an entry is applied wholly, or left to Python with nothing changed. Without memory the start
     fails, and what was applied goes with it;
   - it applies plain changes only: documents without expiry and deletions of the default
     collection. Python does all others, and names what is wrong. */

#include "replay_run.h"

#include "attributes.h"
#include "blocks.h"
#include "key_tree.h"
#include "presumed.h"

#define LOG_HEAD_BYTES 36 /* of an entry, before its extras */
#define MUTATION_EXTRAS 31
#define DELETION_EXTRAS 18
#define OPCODE_AT 13
#define KEY_LENGTH_AT 14
#define EXTRAS_LENGTH_AT 16
#define VB_AT 18
#define BODY_LENGTH_AT 20
#define CAS_AT 28
#define SEQNO_AT 36
#define EXPIRY_AT 56
#define EPOCH_AT 8
#define LOADED_MAX 32 /* entries at once */

enum { /* of a partition */
    NEWEST, APPEND_ENTRY, FROZEN, MERGED_SEQNO, HIGH_SEQNO, COMMITTED_SEQNO, SYNCED_SEQNO, MAX_CAS,
    LEADER_EPOCH, ITEM_COUNT, ATTRIBUTES
};

static const char *const names[ATTRIBUTES] = {
    "newest", "append_entry", "frozen", "merged_seqno", "high_seqno", "committed_seqno",
    "synced_seqno", "max_cas", "leader_epoch", "item_count",
};

typedef struct {
    PyObject_HEAD
    PyObject *partitions; /* a list */
    PyTypeObject *partition;
    Attribute of[ATTRIBUTES];
} ReplayRun;

typedef struct {
    const uint8_t *at;
    size_t bytes, key_at, key_bytes;
    uint64_t seqno, cas;
    PyObject *part; /* borrowed */
    int is_document;
} Logged;

/* What an entry sets; the references are its own. The number of documents may be below zero until
   the presumed ones are looked up. */
typedef struct {
    PyObject *newest, *append, *key, *entry, *seqno, *cas, *item_count; /* NULL: it stays */
    PyObject *presumed_of; /* the partition's number, if the key is presumed */
} Made;

/* The functions below return 1, 0 with an exception, or -1 for what Python should do. */

/* Reads a plain change of the default collection. */
static int read_entry(const ReplayRun *self, Logged *logged, const uint8_t *at, size_t bytes)
{
    if (bytes < LOG_HEAD_BYTES)
        return -1;
    size_t extras = at[EXTRAS_LENGTH_AT], body = be32(at + BODY_LENGTH_AT);
    uint8_t opcode = at[OPCODE_AT];
    uint32_t vb_id = be16(at + VB_AT);
    logged->is_document = opcode == MUTATION;
    logged->at = at;
    logged->bytes = LOG_HEAD_BYTES + body;
    logged->key_at = LOG_HEAD_BYTES + extras;
    logged->key_bytes = be16(at + KEY_LENGTH_AT);
    if ((opcode != MUTATION && opcode != DELETION) ||
        extras != (opcode == MUTATION ? MUTATION_EXTRAS : DELETION_EXTRAS) ||
        logged->bytes > bytes || body < extras + logged->key_bytes || !logged->key_bytes ||
        at[logged->key_at] || (opcode == MUTATION && be32(at + EXPIRY_AT)) ||
        (Py_ssize_t)vb_id >= PyList_GET_SIZE(self->partitions))
        return -1;
    logged->part = PyList_GET_ITEM(self->partitions, vb_id);
    logged->seqno = be64(at + SEQNO_AT);
    logged->cas = be64(at + CAS_AT);
    return Py_IS_TYPE(logged->part, self->partition) ? 1 : -1;
}

/* Finds out whether the key was a document. What only the store knows is presumed. */
static int was_document(const ReplayRun *self, const Logged *logged, Made *made, int *is_live)
{
    PyObject *entry = PyDict_GetItemWithError(made->newest, made->key);
    *is_live = 0;
    if (entry != NULL) {
        if (!PyBytes_CheckExact(entry))
            return -1;
        if (PyBytes_GET_SIZE(entry) > OPCODE_AT)
            *is_live = (uint8_t)PyBytes_AS_STRING(entry)[OPCODE_AT] == MUTATION;
        return 1;
    }
    uint64_t merged_seqno;
    if (PyErr_Occurred() ||
        !attribute_get_number(&self->of[MERGED_SEQNO], logged->part, &merged_seqno))
        return 0;
    *is_live = be64(logged->at) && merged_seqno;
    if (*is_live)
        made->presumed_of = PyLong_FromUnsignedLong(be16(logged->at + VB_AT));
    return !*is_live || made->presumed_of != NULL;
}

/* Makes what an entry sets. */
static int make(const ReplayRun *self, const Logged *logged, Made *made)
{
    PyObject *part = logged->part, *frozen;
    uint64_t high_seqno, max_cas, epoch;
    int is_live, outcome;
    if ((frozen = attribute_get(&self->of[FROZEN], part)) == NULL)
        return 0;
    Py_DECREF(frozen); /* None stays */
    if ((made->newest = attribute_get(&self->of[NEWEST], part)) == NULL ||
        (made->append = attribute_get(&self->of[APPEND_ENTRY], part)) == NULL ||
        !attribute_get_number(&self->of[HIGH_SEQNO], part, &high_seqno) ||
        !attribute_get_number(&self->of[MAX_CAS], part, &max_cas) ||
        !attribute_get_number(&self->of[LEADER_EPOCH], part, &epoch))
        return 0;
    if (frozen != Py_None || !PyDict_CheckExact(made->newest) || logged->seqno <= high_seqno ||
        be32(logged->at + EPOCH_AT) > epoch)
        return -1;
    const char *at = (const char *)logged->at;
    made->key = PyBytes_FromStringAndSize(at + logged->key_at, (Py_ssize_t)logged->key_bytes);
    if (made->key == NULL)
        return 0;
    if ((outcome = was_document(self, logged, made, &is_live)) != 1)
        return outcome;
    made->entry = PyBytes_FromStringAndSize(at, (Py_ssize_t)logged->bytes);
    made->seqno = PyLong_FromUnsignedLongLong(logged->seqno);
    made->cas = PyLong_FromUnsignedLongLong(logged->cas > max_cas ? logged->cas : max_cas);
    if (is_live != logged->is_document)
        made->item_count =
            attribute_sum(&self->of[ITEM_COUNT], part, logged->is_document - is_live);
    return made->entry != NULL && made->seqno != NULL && made->cas != NULL &&
           (is_live == logged->is_document || made->item_count != NULL);
}

static int change(const ReplayRun *self, const Logged *logged, const Made *made,
                  PyObject *presumed)
{
    PyObject *part = logged->part, *done = PyObject_CallOneArg(made->append, made->entry);
    Py_XDECREF(done);
    return done != NULL &&
           (made->presumed_of == NULL || presume(presumed, made->presumed_of, made->key)) &&
           !PyDict_SetItem(made->newest, made->key, made->entry) &&
           (made->item_count == NULL ||
            attribute_set(&self->of[ITEM_COUNT], part, made->item_count)) &&
           attribute_set(&self->of[MAX_CAS], part, made->cas) &&
           attribute_set(&self->of[COMMITTED_SEQNO], part, made->seqno) &&
           attribute_set(&self->of[SYNCED_SEQNO], part, made->seqno) &&
           attribute_set(&self->of[HIGH_SEQNO], part, made->seqno);
}

static int apply_entry(const ReplayRun *self, const uint8_t *at, size_t bytes, PyObject *presumed,
                       size_t *taken)
{
    Logged logged;
    Made made = {0};
    int outcome = read_entry(self, &logged, at, bytes);
    if (outcome == 1)
        outcome = make(self, &logged, &made);
    if (outcome == 1)
        outcome = change(self, &logged, &made, presumed);
    PyObject *all[] = {made.newest, made.append, made.key, made.entry, made.seqno, made.cas,
                       made.item_count, made.presumed_of};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        Py_XDECREF(all[i]);
    *taken = outcome == 1 ? logged.bytes : 0;
    return outcome;
}

/* Loads the partitions and memtables of the next entries, so that the waits for memory overlap.
   Returns where it stopped, or NULL with an exception. */
static const uint8_t *load(const ReplayRun *self, const uint8_t *at, const uint8_t *end)
{
    PyObject *parts[LOADED_MAX];
    size_t count = 0, lines = (size_t)self->partition->tp_basicsize / 64;
    for (; count < LOADED_MAX && end - at >= LOG_HEAD_BYTES; count++) {
        uint32_t vb_id = be16(at + VB_AT);
        size_t bytes = LOG_HEAD_BYTES + (size_t)be32(at + BODY_LENGTH_AT);
        if (bytes > (size_t)(end - at) || (Py_ssize_t)vb_id >= PyList_GET_SIZE(self->partitions))
            break;
        parts[count] = PyList_GET_ITEM(self->partitions, vb_id);
        if (!Py_IS_TYPE(parts[count], self->partition))
            break;
        for (size_t line = 0; line <= lines; line++)
            PREFETCH((const char *)parts[count] + 64 * line);
        at += bytes;
    }
    PyObject *newest[LOADED_MAX];
    for (size_t i = 0; i < count; i++) {
        if ((newest[i] = attribute_get(&self->of[NEWEST], parts[i])) == NULL)
            return NULL;
        Py_DECREF(newest[i]); /* the partition has it */
        PREFETCH(newest[i]);
    }
    for (size_t i = 0; i < count; i++)
        if (PyDict_CheckExact(newest[i]))
            PREFETCH(((PyDictObject *)newest[i])->ma_keys);
    return at;
}

static PyObject *replay_run_adds_up(ReplayRun *Py_UNUSED(self), PyObject *payload)
{
    if (!PyBytes_CheckExact(payload)) {
        PyErr_SetString(PyExc_TypeError, "a payload is bytes");
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(payload);
    size_t at = 0, end = (size_t)PyBytes_GET_SIZE(payload);
    while (end - at >= LOG_HEAD_BYTES &&
           be32(data + at + BODY_LENGTH_AT) <= end - at - LOG_HEAD_BYTES)
        at += LOG_HEAD_BYTES + (size_t)be32(data + at + BODY_LENGTH_AT);
    return PyBool_FromLong(at == end);
}

static PyObject *replay_run_apply(ReplayRun *self, PyObject *args)
{
    PyObject *payload, *presumed;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "SnO!", &payload, &at, &PyDict_Type, &presumed))
        return NULL;
    Py_ssize_t end = PyBytes_GET_SIZE(payload);
    if (at < 0 || at > end) {
        PyErr_SetString(PyExc_ValueError, "this position is not in the payload");
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(payload);
    const uint8_t *loaded = data + at;
    int outcome = 1;
    while (at < end && outcome == 1) {
        size_t taken;
        if (data + at == loaded && (loaded = load(self, loaded, data + end)) == NULL)
            return NULL;
        outcome = apply_entry(self, data + at, (size_t)(end - at), presumed, &taken);
        at += (Py_ssize_t)taken;
    }
    return outcome ? PyLong_FromSsize_t(at) : NULL;
}

static PyObject *replay_run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *partitions;
    if (!has_no_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!", &PyList_Type, &partitions))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    ReplayRun *self = (ReplayRun *)allocate(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->partitions = Py_NewRef(partitions);
    self->partition = partitions_resolve(partitions, self->of, names, ATTRIBUTES);
    if (self->partition == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int replay_run_traverse(ReplayRun *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->partitions);
    Py_VISIT(self->partition);
    return 0;
}

static void replay_run_dealloc(ReplayRun *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->partitions);
    Py_XDECREF(self->partition);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"adds_up", (PyCFunction)replay_run_adds_up, METH_O, NULL},
    {"apply", (PyCFunction)replay_run_apply, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, replay_run_new},
    {Py_tp_dealloc, replay_run_dealloc},
    {Py_tp_traverse, replay_run_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec replay_run_spec = {
    .name = "vbucket.native.loops.ReplayRun",
    .basicsize = sizeof(ReplayRun),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
