/* See get_run.h. vbucket/native/loops.pyi has the interface. dcp/session/document_runs.py calls it;
   that has the rules, and its twin in Python.

   Invariants
   - no byte outside of [position, end) of the received bytes is read;
   - nothing is changed but the list of answers. What the loop does not answer ends the run before
     it: documents that are not in memory, with XATTRs, compressed for a client that does not know
     that, expired, or not committed; keys without a document; and what is damaged;
   - entries are checked before they are read: that they are a mutation of a key of this length;
   - the list gets an item for each answer. All bytes of up to WINDOW_MAX answers are in one item,
     and those behind it are empty;
   - the window is small after a request that is for Python, because what was loaded for those
     behind it is lost. */

#include "get_run.h"

#include "attributes.h"
#include "dict_ahead.h"
#include "get_request.h"
#include "key_tree.h"

#define WINDOW_MIN 4
#define WINDOW_MAX 64 /* enough for waits for memory to overlap */
#define VB_ACTIVE 1

enum { STATE, LAST_GROUP, NEWEST, FROZEN, RECENT, ATTRIBUTES }; /* of a partition */

static const char *const names[ATTRIBUTES] = {
    "state", "last_group", "newest", "frozen", "recent",
};

typedef struct {
    PyObject_HEAD
    PyObject *partitions;             /* a list */
    PyObject *empty;                  /* bytes */
    PyTypeObject *partition, *layer;  /* their classes; `layer` NULL: none was seen */
    Attribute of[ATTRIBUTES];
    Attribute layer_newest;
    size_t window; /* how many requests are looked up at once */
} GetRun;

/* A request, and the document that it asks for. References that are not NULL are its own. */
typedef struct {
    GetRequest request;
    PyObject *newest, *recent, *key, *entry;
    int is_cached; /* whether the document is of the item cache */
} Asked;

/* What all requests of a run share, and what it counts. */
typedef struct {
    PyObject *answers;
    uint64_t committed_group, now_s;
    uint8_t known; /* datatypes of the client */
    Py_ssize_t position, room_bytes, answered, hits, value_bytes;
} Run;

/* The functions below return 1, 0 with an exception, or -1 for what Python should do. */

/* Reads up to `window` requests, and loads their partitions. Returns how many there are. */
static size_t read_ahead(const GetRun *self, Asked *asked, const uint8_t *data, size_t bytes)
{
    size_t count = 0, lines = (size_t)self->partition->tp_basicsize / 64;
    for (size_t at = 0; count < self->window; count++) {
        GetRequest *request = &asked[count].request;
        asked[count] = (Asked){0};
        if (!get_request_read(request, data + at, bytes - at) ||
            (Py_ssize_t)request->vb_id >= PyList_GET_SIZE(self->partitions))
            break;
        const char *part = (const char *)PyList_GET_ITEM(self->partitions, request->vb_id);
        for (size_t line = 0; line <= lines; line++)
            PREFETCH(part + 64 * line);
        at += get_request_bytes(request);
    }
    return count;
}

/* Sets `newest` to that of a frozen layer. */
static int newest_of_layer(GetRun *self, PyObject *layer, PyObject **newest)
{
    if (!Py_IS_TYPE(layer, self->layer)) {
        if (!attributes_resolve(&self->layer_newest, 1, Py_TYPE(layer)))
            return 0;
        Py_XSETREF(self->layer, (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(layer)));
    }
    return (*newest = attribute_get(&self->layer_newest, layer)) != NULL;
}

/* Loads the dictionaries of a partition that may be read. */
static int load(const GetRun *self, const Run *run, Asked *asked)
{
    PyObject *part = PyList_GET_ITEM(self->partitions, asked->request.vb_id);
    uint64_t state, last_group;
    if (!Py_IS_TYPE(part, self->partition))
        return -1;
    if (!attribute_get_number(&self->of[STATE], part, &state) ||
        !attribute_get_number(&self->of[LAST_GROUP], part, &last_group))
        return 0;
    if (state != VB_ACTIVE || last_group > run->committed_group)
        return -1;
    asked->newest = attribute_get(&self->of[NEWEST], part);
    asked->recent = attribute_get(&self->of[RECENT], part);
    if (asked->newest == NULL || asked->recent == NULL)
        return 0;
    if (!PyDict_CheckExact(asked->newest) || !PyDict_CheckExact(asked->recent))
        return -1;
    PREFETCH(asked->newest);
    PREFETCH(asked->recent);
    return 1;
}

/* Takes what a dictionary has of the key. */
static int look_up(Asked *asked, PyObject *entries)
{
    if (!PyDict_CheckExact(entries))
        return -1;
    asked->entry = PyDict_GET_SIZE(entries) ? PyDict_GetItemWithError(entries, asked->key) : NULL;
    Py_XINCREF(asked->entry);
    return asked->entry != NULL || !PyErr_Occurred();
}

/* Finds the newest entry of a key in memory. */
static int find(GetRun *self, Asked *asked)
{
    int outcome = look_up(asked, asked->newest);
    if (outcome != 1 || asked->entry != NULL)
        return outcome;
    PyObject *part = PyList_GET_ITEM(self->partitions, asked->request.vb_id);
    PyObject *frozen = attribute_get(&self->of[FROZEN], part), *newest = NULL;
    if (frozen == NULL)
        return 0;
    if (frozen != Py_None) {
        outcome = newest_of_layer(self, frozen, &newest);
        if (outcome == 1)
            outcome = look_up(asked, newest);
        Py_XDECREF(newest);
    }
    Py_DECREF(frozen);
    if (outcome != 1 || asked->entry != NULL)
        return outcome;
    outcome = look_up(asked, asked->recent);
    asked->is_cached = 1;
    return outcome == 1 && asked->entry == NULL ? -1 : outcome;
}

/* Answers the first requests, whose documents were found. Returns 0 with an exception. */
static int answer(const GetRun *self, Run *run, const Asked *asked, size_t count)
{
    size_t bytes = 0;
    Py_ssize_t taken = 0, hits = 0;
    for (size_t i = 0; i < count; i++) {
        bytes += GET_ANSWER_HEAD_BYTES + entry_value_bytes(asked[i].entry, &asked[i].request);
        taken += (Py_ssize_t)get_request_bytes(&asked[i].request);
        hits += asked[i].is_cached;
    }
    if (!count)
        return 1;
    PyObject *answers = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (answers == NULL)
        return 0;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(answers);
    for (size_t i = 0; i < count; i++)
        at = get_answer_write(at, asked[i].entry, &asked[i].request, run->known);
    int is_done = !PyList_Append(run->answers, answers);
    Py_DECREF(answers);
    for (size_t i = 1; i < count && is_done; i++)
        is_done = !PyList_Append(run->answers, self->empty);
    if (is_done) {
        run->position += taken;
        run->answered += (Py_ssize_t)count;
        run->hits += hits;
    }
    return is_done;
}

/* Finds documents until the answers are enough. Sets how many were found. Returns 1 if all were. */
static int find_all(GetRun *self, Run *run, Asked *asked, size_t count, size_t *found)
{
    Lookup lookups[2 * WINDOW_MAX];
    size_t looked_up = 0;
    for (size_t i = 0; i < count; i++) {
        if ((asked[i].key = get_request_key(&asked[i].request)) == NULL)
            return 0;
        PyObject *dicts[] = {asked[i].newest, asked[i].recent};
        for (int which = 0; which < 2; which++)
            if (PyDict_GET_SIZE(dicts[which]))
                lookups[looked_up++] = (Lookup){dicts[which], PyObject_Hash(asked[i].key), NULL};
    }
    dicts_load(lookups, looked_up);
    for (*found = 0; *found < count; ++*found) {
        Asked *each = &asked[*found];
        if (run->value_bytes > run->room_bytes)
            return -1;
        int outcome = find(self, each);
        if (outcome == 1 && !entry_is_shown(each->entry, &each->request, run->known, run->now_s))
            outcome = -1;
        if (outcome != 1)
            return outcome;
        run->value_bytes += (Py_ssize_t)entry_value_bytes(each->entry, &each->request);
    }
    return 1;
}

/* Answers up to `window` requests. Returns 1 if more may follow. */
static int answer_some(GetRun *self, Run *run, const uint8_t *data, size_t bytes)
{
    Asked asked[WINDOW_MAX];
    size_t count = read_ahead(self, asked, data, bytes), loaded = 0, found = 0;
    int outcome = count == self->window ? 1 : -1, each = 1;
    while (loaded < count && (each = load(self, run, &asked[loaded])) == 1)
        loaded++;
    if (each != 1)
        outcome = each;
    if (outcome) {
        each = find_all(self, run, asked, loaded, &found);
        if (each != 1)
            outcome = each;
    }
    if (outcome && !answer(self, run, asked, found))
        outcome = 0;
    if (found < count)
        self->window = WINDOW_MIN;
    else if (outcome == 1 && self->window < WINDOW_MAX)
        self->window *= 2;
    for (size_t i = 0; i < count; i++) {
        PyObject *all[] = {asked[i].newest, asked[i].recent, asked[i].key, asked[i].entry};
        for (size_t at = 0; at < sizeof all / sizeof all[0]; at++)
            Py_XDECREF(all[at]);
    }
    return outcome;
}

static PyObject *get_run_answer(GetRun *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 8 || !PyBytes_CheckExact(args[0]) || !PyList_CheckExact(args[3])) {
        PyErr_SetString(PyExc_TypeError, "a run takes bytes, positions, a list and numbers");
        return NULL;
    }
    Run run = {.answers = args[3]};
    run.position = PyLong_AsSsize_t(args[1]);
    Py_ssize_t end = PyLong_AsSsize_t(args[2]);
    run.known = (uint8_t)PyLong_AsUnsignedLong(args[4]) & GET_DATATYPES;
    run.now_s = PyLong_AsUnsignedLongLong(args[5]);
    run.committed_group = PyLong_AsUnsignedLongLong(args[6]);
    run.room_bytes = PyLong_AsSsize_t(args[7]);
    if (PyErr_Occurred())
        return NULL;
    if (run.position < 0 || run.position > end || end > PyBytes_GET_SIZE(args[0])) {
        PyErr_SetString(PyExc_ValueError, "the run is not within the received bytes");
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    int outcome;
    do
        outcome = answer_some(self, &run, data + run.position, (size_t)(end - run.position));
    while (outcome == 1);
    if (!outcome)
        return NULL;
    return Py_BuildValue("nnnn", run.position, run.answered, run.hits, run.value_bytes);
}

static PyObject *get_run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *partitions;
    if (!has_no_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!", &PyList_Type, &partitions))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    GetRun *self = (GetRun *)allocate(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->partitions = Py_NewRef(partitions);
    self->partition = partitions_resolve(partitions, self->of, names, ATTRIBUTES);
    self->layer_newest.name = names[NEWEST];
    self->window = WINDOW_MIN;
    self->empty = PyBytes_FromStringAndSize(NULL, 0);
    if (self->empty == NULL || self->partition == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int get_run_traverse(GetRun *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->partitions);
    Py_VISIT(self->partition);
    Py_VISIT(self->layer);
    return 0;
}

static void get_run_dealloc(GetRun *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->partitions);
    Py_XDECREF(self->empty);
    Py_XDECREF(self->partition);
    Py_XDECREF(self->layer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"answer", (PyCFunction)(void (*)(void))get_run_answer, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, get_run_new},
    {Py_tp_dealloc, get_run_dealloc},
    {Py_tp_traverse, get_run_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec get_run_spec = {
    .name = "vbucket.native.loops.GetRun",
    .basicsize = sizeof(GetRun),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
