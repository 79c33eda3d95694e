/* See set_run.h. vbucket/native/loops.pyi has the interface. dcp/session/document_runs.py calls it;
   that and vbucket/engine/engine.py have the rules, and its twin in Python.

   Invariants
   - no byte outside of [position, end) of the received bytes is read;
   - a request either is applied wholly, or has changed nothing but the item cache, whose entry of
     a key that is about to change is taken. What the loop does not know, or finds damaged, ends
     the run before it; then Python handles the request, and names what is wrong;
   - up to `window` requests are planned at once, which reads only, and then applied in order. What
     a plan says of another key than those that were applied since holds until then. The window is
     small after a plan that Python had to carry out, because the plans behind it are lost;
   - objects are made before anything is changed. HIGH_SEQNO is set last, as Keyspace.apply does,
     so `broken_invariant` finds a change that memory was missing for;
   - what is taken from the item cache is subtracted from its `held_bytes` at once. */

#include "set_run.h"

#include "attributes.h"
#include "blocks.h"
#include "crc32c.h"
#include "key_tree.h"
#include "set_request.h"

#include <string.h>
#include <structmember.h>

#define WINDOW_MIN 4 /* what is lost with a plan for Python costs less than that request */
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

enum { HELD_BYTES, TAKEN };

typedef struct {
    PyObject_HEAD
    PyObject *partitions; /* a list */
    PyObject *meta_below, *tree, *item_cache, *damaged;
    PyTypeObject *partition, *layer; /* their classes */
    Attribute of[ATTRIBUTES];
    Attribute layer_newest;
    Attribute of_cache[2]; /* HELD_BYTES and TAKEN of the item cache */
    size_t window;               /* how many requests are planned at once */
    unsigned long long planned;  /* since it was made */
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

/* Removes a key from a dictionary of the item cache whose size is `of`, as its `take` does. */
static int uncache(const SetRun *self, PyObject *cached, const Attribute *of,
                   const Planned *planned, uint64_t bytes)
{
    uint64_t size, held, taken;
    if (!attribute_get_number(of, planned->part, &size) ||
        !attribute_get_number(&self->of_cache[HELD_BYTES], self->item_cache, &held) ||
        !attribute_get_number(&self->of_cache[TAKEN], self->item_cache, &taken))
        return 0;
    if (size < bytes || held < bytes)
        return CACHED;
    PyObject *new_size = PyLong_FromUnsignedLongLong(size - bytes);
    PyObject *new_held = PyLong_FromUnsignedLongLong(held - bytes);
    PyObject *new_taken = PyLong_FromUnsignedLongLong(taken + 1);
    int is_removed = new_size != NULL && new_held != NULL && new_taken != NULL &&
                     !PyDict_DelItem(cached, planned->key) &&
                     attribute_set(of, planned->part, new_size) &&
                     attribute_set(&self->of_cache[HELD_BYTES], self->item_cache, new_held) &&
                     attribute_set(&self->of_cache[TAKEN], self->item_cache, new_taken);
    PyObject *all[] = {new_size, new_held, new_taken};
    for (int i = 0; i < 3; i++)
        Py_XDECREF(all[i]);
    return is_removed;
}

/* Takes a document from the item cache. Returns CACHED if it is none. */
static int take_cached(const SetRun *self, Planned *planned)
{
    for (int which = RECENT; which <= OLDER; which++) {
        PyObject *cached = attribute_get(&self->of[which], planned->part);
        if (cached == NULL)
            return 0;
        PyObject *entry = PyDict_CheckExact(cached) && PyDict_GET_SIZE(cached)
                              ? PyDict_GetItemWithError(cached, planned->key)
                              : NULL;
        int outcome = entry != NULL ? CACHED : PyErr_Occurred() ? 0 : NOT_IN_MEMORY;
        if (entry != NULL && PyBytes_CheckExact(entry) && PyBytes_GET_SIZE(entry) >= NUMBERS_END &&
            PyBytes_AS_STRING(entry)[OPCODE_AT] == MUTATION) {
            uint64_t bytes = (uint64_t)PyBytes_GET_SIZE(entry) + planned->request.key_bytes;
            outcome = old_of_entry(&planned->old, entry);
            if (outcome == 1)
                outcome = uncache(self, cached, &self->of[which + RECENT_BYTES - RECENT], planned,
                                  bytes + ITEM_OVERHEAD_BYTES);
        }
        Py_DECREF(cached);
        if (outcome != NOT_IN_MEMORY)
            return outcome;
    }
    return CACHED;
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

/* What a change sets, made before anything is changed. */
typedef struct {
    PyObject *append, *entry, *answer, *seqno, *cas, *item_count; /* NULL: the count stays */
    int is_touched; /* whether the group knows the partition */
} Made;

/* Makes what a change sets. Returns 0 with an exception; what is made needs `release` then, too. */
static int make(SetRun *self, const Run *run, const Planned *planned, Made *made, uint64_t cas,
                uint64_t seqno)
{
    PyObject *part = planned->part;
    int is_new = planned->old.opcode != MUTATION;
    uint64_t epoch, vb_uuid, last_group;
    if (!attribute_get_number(&self->of[LEADER_EPOCH], part, &epoch) ||
        !attribute_get_number(&self->of[VB_UUID], part, &vb_uuid) ||
        !attribute_get_number(&self->of[LAST_GROUP], part, &last_group))
        return 0;
    if (epoch > UINT32_MAX)
        return -1;
    made->is_touched = last_group == run->group_number;
    made->append = attribute_get(&self->of[APPEND_ENTRY], part);
    made->entry = entry_made(&planned->request, &planned->old, epoch, cas, seqno);
    made->answer = answer_made(&planned->request, cas, vb_uuid, seqno);
    made->seqno = PyLong_FromUnsignedLongLong(seqno);
    made->cas = PyLong_FromUnsignedLongLong(cas);
    made->item_count = is_new ? attribute_sum(&self->of[ITEM_COUNT], part, 1) : NULL;
    return made->append != NULL && made->entry != NULL && made->answer != NULL &&
           made->seqno != NULL && made->cas != NULL && (!is_new || made->item_count != NULL);
}

static void release(Made *made)
{
    PyObject *all[] = {made->append, made->entry, made->answer, made->seqno, made->cas,
                       made->item_count};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        Py_XDECREF(all[i]);
}

/* Carries out a change. A partition that is touched without a change does no harm. */
static int change(SetRun *self, const Run *run, const Planned *planned, const Made *made)
{
    PyObject *part = planned->part, *done;
    if ((!made->is_touched && PyList_Append(run->touched, part)) ||
        PyList_Append(run->pending, made->entry) ||
        (done = PyObject_CallOneArg(made->append, made->entry)) == NULL)
        return 0;
    Py_DECREF(done);
    return !PyDict_SetItem(planned->newest, planned->key, made->entry) &&
           (made->is_touched || attribute_set(&self->of[LAST_GROUP], part, run->group)) &&
           (made->item_count == NULL ||
            attribute_set(&self->of[ITEM_COUNT], part, made->item_count)) &&
           attribute_set(&self->of[MAX_CAS], part, made->cas) &&
           attribute_set(&self->of[HIGH_SEQNO], part, made->seqno) &&
           !PyList_Append(run->answers, made->answer);
}

/* Completes the plan of a request: others may have changed its partition since. */
static int settle(SetRun *self, Planned *planned, uint64_t high_seqno)
{
    if (planned->high_seqno != high_seqno) {
        PyObject *entry = PyDict_GetItemWithError(planned->newest, planned->key);
        if (entry != NULL)
            return old_of_entry(&planned->old, entry);
        if (PyErr_Occurred())
            return 0;
    }
    if (planned->outcome == CACHED)
        planned->outcome = take_cached(self, planned);
    if (planned->outcome == CACHED)
        return old_of_python(self, &planned->old, planned->part, planned->key);
    return planned->outcome;
}

static int apply(SetRun *self, const Run *run, Planned *planned)
{
    uint64_t high_seqno, max_cas;
    if (!attribute_get_number(&self->of[HIGH_SEQNO], planned->part, &high_seqno) ||
        !attribute_get_number(&self->of[MAX_CAS], planned->part, &max_cas))
        return 0;
    int outcome = settle(self, planned, high_seqno);
    if (outcome != 1)
        return outcome;
    if (planned->old.opcode == MUTATION && planned->old.datatype > DATATYPE_PLAIN_MAX)
        return -1; /* its XATTRs stay */
    if (high_seqno == UINT64_MAX || max_cas == UINT64_MAX)
        return -1;
    uint64_t cas = run->cas_floor > max_cas ? run->cas_floor : max_cas + 1;
    Made made = {0};
    outcome = make(self, run, planned, &made, cas, high_seqno + 1);
    if (outcome == 1)
        outcome = change(self, run, planned, &made);
    release(&made);
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
    for (size_t at = 0; count < self->window; count++) {
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

/* Applies up to `window` requests. Sets how many bytes they have. Returns 1 if more may follow,
   -1 if not, 0 with an exception. */
static int apply_some(SetRun *self, const Run *run, const uint8_t *data, size_t bytes,
                      Py_ssize_t *taken)
{
    Planned planned[SEARCHES_MAX];
    size_t count = read_ahead(self, run, planned, data, bytes), ready = 0;
    int outcome = count == self->window ? 1 : -1, each;
    for (size_t i = 0; i < count; i++)
        planned[i].part = planned[i].newest = planned[i].key = NULL;
    each = load(self, planned, count);
    while (each == 1 && ready < count && (each = plan(self, &planned[ready])) == 1)
        ready++;
    if (each != 1)
        outcome = each;
    self->planned += ready;
    if (outcome && !search_store(self, planned, ready))
        outcome = 0;
    for (size_t i = 0; i < ready && outcome && each; i++) {
        if ((each = apply(self, run, &planned[i])) != 1) {
            self->window = WINDOW_MIN;
            outcome = each;
            break;
        }
        *taken += (Py_ssize_t)request_bytes(&planned[i].request);
    }
    if (outcome == 1 && self->window < SEARCHES_MAX)
        self->window *= 2;
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
        PyErr_SetString(PyExc_TypeError, "a run takes bytes, positions, three lists and numbers");
        return NULL;
    }
    Py_ssize_t position = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    Run run = {args[3], args[4], args[5], args[6], 0, 0, 0, 0};
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
    int outcome;
    do
        outcome = apply_some(self, &run, data + position, (size_t)(end - position), &position);
    while (outcome == 1);
    return outcome ? PyLong_FromSsize_t(position) : NULL;
}

static PyObject *set_run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *partitions, *meta_below, *tree, *item_cache, *damaged;
    if (!has_no_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!OOOO", &PyList_Type, &partitions, &meta_below, &tree,
                          &item_cache, &damaged))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    SetRun *self = (SetRun *)allocate(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->partitions = Py_NewRef(partitions);
    self->meta_below = Py_NewRef(meta_below);
    self->tree = Py_NewRef(tree);
    self->item_cache = Py_NewRef(item_cache);
    self->damaged = Py_NewRef(damaged);
    self->partition = partitions_resolve(partitions, self->of, names, ATTRIBUTES);
    self->layer_newest.name = names[NEWEST];
    self->of_cache[HELD_BYTES].name = "held_bytes";
    self->of_cache[TAKEN].name = "taken";
    self->window = WINDOW_MIN;
    if (self->partition == NULL ||
        !attributes_resolve(self->of_cache, 2, Py_TYPE(item_cache)))
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
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->partitions);
    Py_XDECREF(self->meta_below);
    Py_XDECREF(self->tree);
    Py_XDECREF(self->item_cache);
    Py_XDECREF(self->damaged);
    Py_XDECREF(self->partition);
    Py_XDECREF(self->layer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"apply", (PyCFunction)(void (*)(void))set_run_apply, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"planned", T_ULONGLONG, offsetof(SetRun, planned), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, set_run_new},
    {Py_tp_dealloc, set_run_dealloc},
    {Py_tp_traverse, set_run_traverse},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec set_run_spec = {
    .name = "vbucket.native.loops.SetRun",
    .basicsize = sizeof(SetRun),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
