/* See set_run.h. Who calls it: dcp/session/documents.py. vbucket/native/loops.pyi has the
   interface. dcp/session/documents.py and vbucket/engine/engine.py have the rules, and its twin in
   Python.

   Invariants
   - no byte outside of [position, end) of the received bytes is read;
   - a request either is applied wholly, or has changed nothing but the item cache, whose entry of
     a key that is about to change is taken. What the loop does not know, or finds damaged, ends
     the run before it; then Python handles the request, and names what is wrong;
   - requests are planned SEARCHES_MAX at once, which reads only, and then applied in order. What a
     plan says of another key than those that were applied since holds until then;
   - objects are made before anything is changed. The order of changes is that of Keyspace.apply,
     so `broken_invariant` finds one that memory was missing for. */

#include "set_run.h"

#include "attributes.h"
#include "blocks.h"
#include "crc32c.h"
#include "key_tree.h"
#include "set_request.h"

#include <string.h>

#define DATATYPE_PLAIN_MAX 3 /* JSON and Snappy; all above have XATTRs */
#define RECORD_BYTES 38 /* of by_key: vbucket/store/key_record.py */
#define RECORD_CRC_AT 34
#define ITEM_OVERHEAD_BYTES 140 /* vbucket/engine/item_cache.py */
#define VB_ACTIVE 1

enum { /* of a partition */
    STATE, IS_BACKED_UP, NEWEST, APPEND_ENTRY, FROZEN, MERGED_SEQNO, RECENT, OLDER,
    RECENT_BYTES, OLDER_BYTES, HIGH_SEQNO, MAX_CAS, LEADER_EPOCH, VB_UUID, LAST_GROUP, ITEM_COUNT,
    ATTRIBUTES
};

static const char *const names[ATTRIBUTES] = {
    "state", "is_backed_up", "newest", "append_entry", "frozen", "merged_seqno", "recent", "older",
    "recent_bytes", "older_bytes", "high_seqno", "max_cas", "leader_epoch", "vb_uuid", "last_group",
    "item_count",
};

typedef struct {
    PyObject_HEAD
    PyObject *partitions; /* a list */
    PyObject *meta_below, *tree, *item_cache, *damaged;
    PyTypeObject *partition, *layer; /* their classes */
    Attribute of[ATTRIBUTES];
    Attribute layer_newest;
} SetRun;

/* A request, and what it replaces. The references are its own. */
typedef struct {
    Request request;
    PyObject *part, *newest, *key;
    uint64_t high_seqno;
    Old old;
    int outcome; /* of `old_version` */
    uint8_t full_key[2 + KEY_BYTES_MAX];
} Planned;

/* What all requests of a run share. */
typedef struct {
    PyObject *answers, *pending, *touched, *group;
    uint64_t group_number, cas_floor, value_bytes_max;
    uint8_t json;
    Py_ssize_t taken, taken_bytes; /* from the item cache */
} Run;

/* The functions below return 1, 0 with an exception, or -1 for what Python should do. Those that
   look for an old version may also return these. */
enum { NOT_IN_MEMORY = 2, CACHED /* Versions.meta_below knows it */ };

static int refused(const SetRun *self)
{
    if (!PyErr_ExceptionMatches(self->damaged))
        return 0;
    PyErr_Clear();
    return -1;
}

/* Of an entry of a layer; an empty one says that the key does not exist, whatever lower layers
   have. */
static int old_of_entry(Old *old, PyObject *entry)
{
    if (!PyBytes_CheckExact(entry))
        return -1;
    if (!PyBytes_GET_SIZE(entry))
        return 1;
    if (PyBytes_GET_SIZE(entry) < NUMBERS_END)
        return -1;
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(entry);
    *old = (Old){be64(at + SEQNO_AT), be64(at + REV_SEQNO_AT), at[OPCODE_AT], at[DATATYPE_AT]};
    return 1;
}

/* Asks Versions.meta_below. */
static int old_of_python(const SetRun *self, Old *old, PyObject *part, PyObject *key)
{
    PyObject *args[] = {part, key, Py_None};
    PyObject *meta = PyObject_Vectorcall(self->meta_below, args, 3, NULL);
    if (meta == NULL)
        return refused(self);
    unsigned long long others[3];
    unsigned int opcode = 0, datatype = 0;
    int is_meta = PyTuple_Check(meta) &&
                  PyArg_ParseTuple(meta, "IKIKKKK", &opcode, &others[0], &datatype, &others[1],
                                   &others[2], &old->seqno, &old->rev_seqno);
    Py_DECREF(meta);
    old->opcode = (uint8_t)opcode;
    old->datatype = (uint8_t)datatype;
    return is_meta;
}

/* Looks in the frozen layer. Returns NOT_IN_MEMORY if the key is not there. */
static int old_of_frozen(SetRun *self, Old *old, PyObject *frozen, PyObject *key)
{
    if (frozen == Py_None)
        return NOT_IN_MEMORY;
    if (!Py_IS_TYPE(frozen, self->layer)) {
        if (!attributes_resolve(&self->layer_newest, 1, Py_TYPE(frozen)))
            return 0;
        Py_XSETREF(self->layer, (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(frozen)));
    }
    PyObject *newest = attribute_get(&self->layer_newest, frozen);
    if (newest == NULL)
        return 0;
    int outcome = -1;
    if (PyDict_CheckExact(newest)) {
        PyObject *entry = PyDict_GetItemWithError(newest, key);
        if (entry != NULL)
            outcome = old_of_entry(old, entry);
        else
            outcome = PyErr_Occurred() ? 0 : NOT_IN_MEMORY;
    }
    Py_DECREF(newest);
    return outcome;
}

/* Returns CACHED if the item cache has the key, else NOT_IN_MEMORY. */
static int old_of_cache(const SetRun *self, PyObject *part, PyObject *key)
{
    for (int which = RECENT; which <= OLDER; which++) {
        PyObject *cached = attribute_get(&self->of[which], part), *entry = NULL;
        if (cached == NULL)
            return 0;
        if (PyDict_CheckExact(cached) && PyDict_GET_SIZE(cached))
            entry = PyDict_GetItemWithError(cached, key);
        if (entry != NULL) {
            PREFETCH(entry);
            PREFETCH((const char *)entry + 64);
        }
        Py_DECREF(cached);
        if (entry != NULL || PyErr_Occurred())
            return entry != NULL ? CACHED : 0;
    }
    return NOT_IN_MEMORY;
}

/* Takes a document from the item cache, as its `take` does. Returns CACHED if it is none. */
static int take_cached(const SetRun *self, Run *run, Planned *planned)
{
    for (int which = RECENT; which <= OLDER; which++) {
        PyObject *cached = attribute_get(&self->of[which], planned->part);
        if (cached == NULL)
            return 0;
        PyObject *entry = NULL;
        if (PyDict_CheckExact(cached) && PyDict_GET_SIZE(cached))
            entry = PyDict_GetItemWithError(cached, planned->key);
        int outcome = entry != NULL ? CACHED : PyErr_Occurred() ? 0 : NOT_IN_MEMORY;
        uint64_t held, bytes = 0;
        if (entry != NULL && PyBytes_CheckExact(entry) && PyBytes_GET_SIZE(entry) >= NUMBERS_END &&
            PyBytes_AS_STRING(entry)[OPCODE_AT] == MUTATION) {
            const Attribute *of = &self->of[which + RECENT_BYTES - RECENT];
            bytes = (uint64_t)PyBytes_GET_SIZE(entry) + planned->request.key_bytes;
            bytes += ITEM_OVERHEAD_BYTES;
            outcome = old_of_entry(&planned->old, entry) == 1 &&
                      attribute_get_number(of, planned->part, &held) &&
                      !PyDict_DelItem(cached, planned->key) &&
                      attribute_set_number(of, planned->part, held - bytes);
            run->taken += outcome;
            run->taken_bytes += outcome ? (Py_ssize_t)bytes : 0;
        }
        Py_DECREF(cached);
        if (outcome != NOT_IN_MEMORY)
            return outcome;
    }
    return CACHED;
}

/* Adds to a number of the item cache. Returns 0 with an exception. */
static int add_to_cache(const SetRun *self, const char *name, Py_ssize_t more)
{
    PyObject *before = PyObject_GetAttrString(self->item_cache, name);
    PyObject *number = PyLong_FromSsize_t(more);
    PyObject *after = before != NULL && number != NULL ? PyNumber_Add(before, number) : NULL;
    int is_set = after != NULL && !PyObject_SetAttrString(self->item_cache, name, after);
    Py_XDECREF(before);
    Py_XDECREF(number);
    Py_XDECREF(after);
    return is_set;
}

/* Does what Versions.meta_below does for a key that the active layer does not have. */
static int old_below(SetRun *self, Old *old, PyObject *part, PyObject *key)
{
    PyObject *frozen = attribute_get(&self->of[FROZEN], part);
    if (frozen == NULL)
        return 0;
    int outcome = old_of_frozen(self, old, frozen, key);
    Py_DECREF(frozen);
    if (outcome != NOT_IN_MEMORY)
        return outcome;
    uint64_t merged_seqno;
    if (!attribute_get_number(&self->of[MERGED_SEQNO], part, &merged_seqno))
        return 0;
    return merged_seqno ? old_of_cache(self, part, key) : 1;
}

static int old_version(SetRun *self, Old *old, PyObject *part, PyObject *newest, PyObject *key)
{
    *old = (Old){0, 0, DELETION, 0};
    PyObject *entry = PyDict_GetItemWithError(newest, key);
    if (entry != NULL)
        return old_of_entry(old, entry);
    return PyErr_Occurred() ? 0 : old_below(self, old, part, key);
}

/* Takes what the store has of a key. Returns CACHED for what only Python can tell. */
static int old_of_search(Old *old, const Search *search)
{
    const uint8_t *at = search->value;
    if (search->outcome == ABSENT)
        return 1;
    if (search->outcome == UNKNOWN || search->value_bytes != RECORD_BYTES ||
        crc32c(crc32c(0, search->key, search->key_bytes), at, RECORD_CRC_AT) !=
            be32(at + RECORD_CRC_AT))
        return CACHED;
    *old = (Old){be64(at + 10), be64(at + 18), at[0], at[1]};
    return 1;
}

/* Looks up in the store what is not in memory. Returns 0 with an exception. */
static int search_store(const SetRun *self, Planned *planned, size_t count)
{
    Search searches[SEARCHES_MAX];
    Planned *of[SEARCHES_MAX];
    size_t searched = 0;
    for (size_t i = 0; i < count; i++)
        if (planned[i].outcome == NOT_IN_MEMORY) {
            Request *request = &planned[i].request;
            put_be(planned[i].full_key, request->vb_id, 2);
            memcpy(planned[i].full_key + 2, request->at + REQUEST_HEAD_BYTES, request->key_bytes);
            searches[searched] = (Search){.key = planned[i].full_key};
            searches[searched].key_bytes = 2 + (size_t)request->key_bytes;
            of[searched++] = &planned[i];
        }
    if (!searched)
        return 1;
    PyObject *tree = PyObject_CallNoArgs(self->tree);
    if (tree == NULL && refused(self) == -1)
        tree = Py_NewRef(Py_None);
    if (tree == NULL)
        return 0;
    if (is_key_tree(tree))
        key_tree_search((KeyTree *)tree, searches, searched);
    for (size_t i = 0; i < searched; i++)
        of[i]->outcome = is_key_tree(tree) ? old_of_search(&of[i]->old, &searches[i]) : CACHED;
    Py_DECREF(tree);
    return 1;
}

/* Sets the numbers of a partition after a change. */
static int numbers_changed(SetRun *self, PyObject *part, const Run *run, uint64_t seqno,
                           uint64_t cas, int is_new)
{
    uint64_t last_group, item_count;
    if (!attribute_set_number(&self->of[HIGH_SEQNO], part, seqno) ||
        !attribute_get_number(&self->of[LAST_GROUP], part, &last_group))
        return 0;
    if (last_group != run->group_number &&
        (!attribute_set(&self->of[LAST_GROUP], part, run->group) ||
         PyList_Append(run->touched, part)))
        return 0;
    if (is_new && (!attribute_get_number(&self->of[ITEM_COUNT], part, &item_count) ||
                   !attribute_set_number(&self->of[ITEM_COUNT], part, item_count + 1)))
        return 0;
    return attribute_set_number(&self->of[MAX_CAS], part, cas);
}

/* Completes the plan of a request: others may have changed its partition since. */
static int settle(SetRun *self, Run *run, Planned *planned, uint64_t high_seqno)
{
    if (planned->high_seqno != high_seqno) {
        PyObject *entry = PyDict_GetItemWithError(planned->newest, planned->key);
        if (entry != NULL)
            return old_of_entry(&planned->old, entry);
        if (PyErr_Occurred())
            return 0;
    }
    if (planned->outcome == CACHED)
        planned->outcome = take_cached(self, run, planned);
    if (planned->outcome == CACHED)
        return old_of_python(self, &planned->old, planned->part, planned->key);
    return planned->outcome;
}

static int apply(SetRun *self, Run *run, Planned *planned)
{
    PyObject *part = planned->part;
    const Request *request = &planned->request;
    uint64_t high_seqno, max_cas, epoch, vb_uuid;
    if (!attribute_get_number(&self->of[HIGH_SEQNO], part, &high_seqno))
        return 0;
    int outcome = settle(self, run, planned, high_seqno);
    if (outcome != 1)
        return outcome;
    const Old *old = &planned->old;
    if (old->opcode == MUTATION && old->datatype > DATATYPE_PLAIN_MAX)
        return -1; /* its XATTRs stay */
    if (!attribute_get_number(&self->of[MAX_CAS], part, &max_cas) ||
        !attribute_get_number(&self->of[LEADER_EPOCH], part, &epoch) ||
        !attribute_get_number(&self->of[VB_UUID], part, &vb_uuid))
        return 0;
    if (high_seqno == UINT64_MAX || max_cas == UINT64_MAX || epoch > UINT32_MAX)
        return -1;
    uint64_t seqno = high_seqno + 1, cas = run->cas_floor;
    if (cas <= max_cas)
        cas = max_cas + 1;
    PyObject *append = attribute_get(&self->of[APPEND_ENTRY], part);
    PyObject *entry = entry_made(request, old, epoch, cas, seqno);
    PyObject *answer = answer_made(request, cas, vb_uuid, seqno);
    PyObject *done = NULL;
    outcome = append != NULL && entry != NULL && answer != NULL &&
              !PyList_Append(run->pending, entry) &&
              (done = PyObject_CallOneArg(append, entry)) != NULL &&
              !PyDict_SetItem(planned->newest, planned->key, entry) &&
              numbers_changed(self, part, run, seqno, cas, old->opcode != MUTATION) &&
              !PyList_Append(run->answers, answer);
    Py_XDECREF(append);
    Py_XDECREF(entry);
    Py_XDECREF(answer);
    Py_XDECREF(done);
    return outcome;
}

/* Plans a request if its partition takes writes. */
static int plan(SetRun *self, Planned *planned)
{
    const Request *request = &planned->request;
    PyObject *part = PyList_GET_ITEM(self->partitions, request->vb_id);
    uint64_t state;
    if (!attribute_get_number(&self->of[STATE], part, &state))
        return 0;
    PyObject *is_backed_up = attribute_get(&self->of[IS_BACKED_UP], part);
    Py_XDECREF(is_backed_up); /* True and False stay */
    if (is_backed_up == NULL)
        return 0;
    if (state != VB_ACTIVE || is_backed_up != Py_False)
        return -1;
    planned->part = Py_NewRef(part);
    planned->key = PyBytes_FromStringAndSize((const char *)request->at + REQUEST_HEAD_BYTES,
                                             request->key_bytes);
    if (planned->key == NULL ||
        !attribute_get_number(&self->of[HIGH_SEQNO], part, &planned->high_seqno))
        return 0;
    if (!PyDict_CheckExact(planned->newest))
        return -1;
    planned->outcome = old_version(self, &planned->old, part, planned->newest, planned->key);
    return planned->outcome > 0 ? 1 : planned->outcome;
}

/* Loads the memtables of all requests. Of a class with slots, the numbers are objects, too. Returns
   0 with an exception. */
static int load(const SetRun *self, Planned *planned, size_t count)
{
    static const int numbers[] = {APPEND_ENTRY, HIGH_SEQNO, MAX_CAS, VB_UUID};
    for (size_t i = 0; i < count; i++) {
        PyObject *part = PyList_GET_ITEM(self->partitions, planned[i].request.vb_id);
        planned[i].newest = attribute_get(&self->of[NEWEST], part);
        if (planned[i].newest == NULL)
            return 0;
        for (size_t at = 0; at < sizeof numbers / sizeof numbers[0]; at++)
            if (self->of[numbers[at]].getset == NULL)
                PREFETCH(*(PyObject **)((char *)part + self->of[numbers[at]].offset));
    }
    for (size_t i = 0; i < count; i++)
        if (PyDict_CheckExact(planned[i].newest))
            PREFETCH(((PyDictObject *)planned[i].newest)->ma_keys);
    return 1;
}

/* Reads requests from `*position` on, and loads what they need. Returns how many there are. */
static size_t read_ahead(const SetRun *self, const Run *run, Planned *planned,
                         const uint8_t *data, size_t bytes)
{
    size_t count = 0, lines = (size_t)self->partition->tp_basicsize / 64;
    for (size_t at = 0; count < SEARCHES_MAX; count++) {
        Request *request = &planned[count].request;
        if (!request_read(request, data + at, bytes - at, run->value_bytes_max, run->json) ||
            (Py_ssize_t)request->vb_id >= PyList_GET_SIZE(self->partitions))
            break;
        PyObject *part = PyList_GET_ITEM(self->partitions, request->vb_id);
        if (!Py_IS_TYPE(part, self->partition))
            break;
        for (size_t line = 0; line <= lines; line++)
            PREFETCH((const char *)part + 64 * line);
        at += request_bytes(request);
    }
    return count;
}

/* Applies up to SEARCHES_MAX requests. Sets how many bytes they have. Returns 1 if more may follow,
   -1 if not, 0 with an exception. */
static int apply_some(SetRun *self, Run *run, const uint8_t *data, size_t bytes,
                      Py_ssize_t *taken)
{
    Planned planned[SEARCHES_MAX];
    size_t count = read_ahead(self, run, planned, data, bytes), ready = 0;
    int outcome = count == SEARCHES_MAX ? 1 : -1, each;
    for (size_t i = 0; i < count; i++)
        planned[i].part = planned[i].newest = planned[i].key = NULL;
    each = load(self, planned, count);
    while (each == 1 && ready < count && (each = plan(self, &planned[ready])) == 1)
        ready++;
    if (each != 1)
        outcome = each;
    if (outcome && !search_store(self, planned, ready))
        outcome = 0;
    for (size_t i = 0; i < ready && outcome && each; i++) {
        const Request *request = &planned[i].request;
        if ((each = apply(self, run, &planned[i])) == 1)
            *taken += (Py_ssize_t)request_bytes(request);
        else {
            outcome = each;
            break;
        }
    }
    for (size_t i = 0; i < count; i++) {
        Py_XDECREF(planned[i].part);
        Py_XDECREF(planned[i].newest);
        Py_XDECREF(planned[i].key);
    }
    return outcome;
}

static PyObject *set_run_apply(SetRun *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 10 || !PyBytes_CheckExact(args[0]) || !PyList_CheckExact(args[3]) ||
        !PyList_CheckExact(args[4]) || !PyList_CheckExact(args[5])) {
        PyErr_SetString(PyExc_TypeError, "a run takes bytes, two positions, three lists, and four "
                                         "numbers");
        return NULL;
    }
    Py_ssize_t position = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    Run run = {args[3], args[4], args[5], args[6], 0, 0, 0, 0, 0, 0};
    run.group_number = PyLong_AsUnsignedLongLong(args[6]);
    run.cas_floor = PyLong_AsUnsignedLongLong(args[7]);
    run.json = (uint8_t)PyLong_AsUnsignedLong(args[8]) & DATATYPE_JSON;
    run.value_bytes_max = PyLong_AsUnsignedLongLong(args[9]);
    if (PyErr_Occurred())
        return NULL;
    if (position < 0 || position > end || end > PyBytes_GET_SIZE(args[0])) {
        PyErr_SetString(PyExc_ValueError, "the run is not within the received bytes");
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    int outcome = 1;
    while (outcome == 1)
        outcome = apply_some(self, &run, data + position, (size_t)(end - position), &position);
    if (run.taken) {
        PyObject *error, *value, *trace; /* what is taken counts, also if there is an exception */
        PyErr_Fetch(&error, &value, &trace);
        outcome = add_to_cache(self, "held_bytes", -run.taken_bytes) &&
                          add_to_cache(self, "taken", run.taken)
                      ? outcome
                      : 0;
        if (error != NULL)
            PyErr_Restore(error, value, trace);
    }
    return outcome ? PyLong_FromSsize_t(position) : NULL;
}

static PyObject *set_run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *partitions, *meta_below, *tree, *item_cache, *damaged;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "SetRun() takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!OOOO", &PyList_Type, &partitions, &meta_below, &tree,
                          &item_cache, &damaged))
        return NULL;
    if (!PyList_GET_SIZE(partitions)) {
        PyErr_SetString(PyExc_ValueError, "there is no partition");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    SetRun *self = (SetRun *)allocate(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->partitions = Py_NewRef(partitions);
    self->meta_below = Py_NewRef(meta_below);
    self->tree = Py_NewRef(tree);
    self->item_cache = Py_NewRef(item_cache);
    self->damaged = Py_NewRef(damaged);
    PyTypeObject *partition = Py_TYPE(PyList_GET_ITEM(partitions, 0));
    self->partition = (PyTypeObject *)Py_NewRef((PyObject *)partition);
    self->layer_newest.name = names[NEWEST];
    for (int i = 0; i < ATTRIBUTES; i++)
        self->of[i].name = names[i];
    if (!attributes_resolve(self->of, ATTRIBUTES, partition))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int set_run_traverse(SetRun *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->partitions);
    Py_VISIT(self->meta_below);
    Py_VISIT(self->tree);
    Py_VISIT(self->item_cache);
    Py_VISIT(self->damaged);
    Py_VISIT(self->partition);
    Py_VISIT(self->layer);
    return 0;
}

static void set_run_dealloc(SetRun *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->partitions);
    Py_XDECREF(self->meta_below);
    Py_XDECREF(self->tree);
    Py_XDECREF(self->item_cache);
    Py_XDECREF(self->damaged);
    Py_XDECREF(self->partition);
    Py_XDECREF(self->layer);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"apply", (PyCFunction)(void (*)(void))set_run_apply, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, set_run_new},
    {Py_tp_dealloc, set_run_dealloc},
    {Py_tp_traverse, set_run_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec set_run_spec = {
    .name = "vbucket.native.loops.SetRun",
    .basicsize = sizeof(SetRun),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
