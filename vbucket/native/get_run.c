/* See get_run.h. vbucket/native/loops.pyi has the interface. dcp/session/kv/runs.py calls it;
   dcp/session/kv/documents.py and vbucket/engine/versions.py have the rules.

   Invariants
   - no byte outside of [position, end) of the received bytes is read;
   - nothing is changed but the list of answers, and the item cache, which keeps what was read from
     the store. What the loop does not answer ends the run before it: documents with XATTRs,
     compressed for a client that does not know that, expired, or not committed; and what is
     damaged;
   - entries are checked before they are read: that they are a mutation of a key of this length;
   - what the store has counts only if neither layer nor the cache has the key;
   - the list gets an item for each answer; a quiet GET without a document has none. All bytes of
     up to WINDOW_MAX answers are in one item, and those behind it are empty;
   - the window is small after a request that is for Python, because what was loaded for those
     behind it is lost. */

#include "get_run.h"

#include "attributes.h"
#include "blocks.h"
#include "dict_ahead.h"
#include "get_request.h"
#include "stored_documents.h"

#include <string.h>

#define WINDOW_MIN 4
#define WINDOW_MAX 64 /* enough for waits for memory to overlap */
#define VB_ACTIVE 1

#define KEY_BYTES_MAX 251

enum { STATE, LAST_GROUP, NEWEST, FROZEN, RECENT, OLDER, MERGED_SEQNO, ATTRIBUTES }; /* partition */

static const char *const names[ATTRIBUTES] = {
    "state", "last_group", "newest", "frozen", "recent", "older", "merged_seqno",
};

typedef struct {
    PyObject_HEAD
    PyObject *partitions;             /* a list */
    PyObject *empty;                  /* bytes */
    PyObject *trees;                  /* returns the trees of by_key and by_seqno, or None */
    PyObject *keep;                   /* of the item cache */
    PyObject *damaged;                /* what `trees` raises if the store is damaged */
    PyTypeObject *partition, *layer;  /* their classes; `layer` NULL: none was seen */
    Attribute of[ATTRIBUTES];
    Attribute layer_newest;
    size_t window; /* how many requests are looked up at once */
} GetRun;

/* A request, and the document that it asks for. References that are not NULL are its own. */
typedef struct {
    GetRequest request;
    PyObject *newest, *recent, *key, *entry; /* `entry` NULL: there is no document */
    enum { IN_MEMORY, IN_CACHE, IN_STORE, LEFT /* for Python */ } place;
    Wanted wanted;
    uint8_t full_key[2 + KEY_BYTES_MAX];
} Asked;

/* What all requests of a run share, and what it counts. */
typedef struct {
    PyObject *answers;
    uint64_t committed_group, now_s;
    MissText miss;
    uint8_t known, form; /* datatypes of the client */
    Py_ssize_t position, room_bytes, answered, hits, misses, value_bytes;
} Run;

/* The functions below return 1, 0 with an exception, or -1 for what Python should do. */

/* Reads up to `window` requests, and loads their partitions. Returns how many there are. */
static size_t read_ahead(const GetRun *self, const Run *run, Asked *asked, const uint8_t *data,
                         size_t bytes)
{
    size_t count = 0, lines = (size_t)self->partition->tp_basicsize / 64;
    for (size_t at = 0; count < self->window; count++) {
        GetRequest *request = &asked[count].request;
        asked[count] = (Asked){0};
        if (!get_request_read(request, data + at, bytes - at, run->form,
                              (uint32_t)PyList_GET_SIZE(self->partitions)) ||
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

/* Takes what the item cache has, or leaves the key to the store. */
static int look_up_cached(GetRun *self, Asked *asked, PyObject *part)
{
    int outcome = look_up(asked, asked->recent);
    asked->place = IN_CACHE;
    if (outcome != 1 || asked->entry != NULL)
        return outcome;
    uint64_t merged_seqno;
    PyObject *older = NULL;
    if (!attribute_get_number(&self->of[MERGED_SEQNO], part, &merged_seqno) ||
        (older = attribute_get(&self->of[OLDER], part)) == NULL)
        return 0;
    int is_older = !PyDict_CheckExact(older) ? -1 : !PyDict_GET_SIZE(older) ? 0
                                                  : PyDict_Contains(older, asked->key);
    Py_DECREF(older);
    if (is_older < 0)
        return PyErr_Occurred() ? 0 : -1;
    if (is_older)
        return -1; /* `find` of the cache moves it */
    asked->place = merged_seqno ? IN_STORE : IN_MEMORY;
    return 1;
}

/* Finds the newest entry of a key in memory, or the place where it may be. */
static int find(GetRun *self, Asked *asked)
{
    int outcome = look_up(asked, asked->newest);
    asked->place = IN_MEMORY;
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
    return look_up_cached(self, asked, part);
}

/* Takes the trees of the store, a tuple or None. Returns NULL with an exception. */
static PyObject *store_trees(const GetRun *self)
{
    PyObject *trees = PyObject_CallNoArgs(self->trees);
    if (trees == NULL && PyErr_ExceptionMatches(self->damaged)) {
        PyErr_Clear();
        trees = Py_NewRef(Py_None);
    }
    if (trees != NULL && trees != Py_None &&
        !(PyTuple_CheckExact(trees) && PyTuple_GET_SIZE(trees) == 2 &&
          is_key_tree(PyTuple_GET_ITEM(trees, 0)) && is_key_tree(PyTuple_GET_ITEM(trees, 1)))) {
        Py_SETREF(trees, Py_NewRef(Py_None));
    }
    return trees;
}

/* Looks up what is IN_STORE; what it cannot find out is LEFT. The result is valid while `trees`,
   a new reference, is held. Returns 0 with an exception. */
static int search_store(const GetRun *self, Asked *asked, size_t count, PyObject **trees)
{
    Wanted wanted[WINDOW_MAX];
    size_t of[WINDOW_MAX], searched = 0;
    for (size_t i = 0; i < count; i++)
        if (asked[i].place == IN_STORE) {
            const GetRequest *request = &asked[i].request;
            put_be(asked[i].full_key, request->vb_id, 2);
            get_request_key_write(request, asked[i].full_key + 2);
            wanted[searched] = (Wanted){.full_key = asked[i].full_key};
            wanted[searched].key_bytes = 2 + (size_t)request->key_bytes;
            of[searched++] = i;
        }
    if (!searched)
        return 1;
    *trees = store_trees(self);
    if (*trees == NULL)
        return 0;
    if (*trees != Py_None)
        stored_documents_find((const KeyTree *)PyTuple_GET_ITEM(*trees, 0),
                              (const KeyTree *)PyTuple_GET_ITEM(*trees, 1), wanted, searched);
    for (size_t i = 0; i < searched; i++) {
        asked[of[i]].wanted = wanted[i];
        if (*trees == Py_None || wanted[i].outcome == UNKNOWN)
            asked[of[i]].place = LEFT;
    }
    return 1;
}

/* Makes the entry of a document that the store has, and offers it to the item cache. */
static int take_stored(const GetRun *self, Asked *asked)
{
    if (asked->wanted.outcome == ABSENT)
        return 1;
    size_t bytes = asked->wanted.frame_bytes;
    asked->entry = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(PREFIX_BYTES + bytes));
    if (asked->entry == NULL)
        return 0;
    memset(PyBytes_AS_STRING(asked->entry), 0, PREFIX_BYTES);
    memcpy(PyBytes_AS_STRING(asked->entry) + PREFIX_BYTES, asked->wanted.frame, bytes);
    PyObject *part = PyList_GET_ITEM(self->partitions, asked->request.vb_id);
    PyObject *args[] = {part, asked->key, asked->entry};
    PyObject *done = PyObject_Vectorcall(self->keep, args, 3, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

/* Whether there surely is no document: b"", or the entry of a removal. */
static int is_removed(PyObject *entry)
{
    if (entry == NULL)
        return 1;
    if (!PyBytes_CheckExact(entry))
        return 0;
    Py_ssize_t bytes = PyBytes_GET_SIZE(entry);
    return !bytes || (bytes > PREFIX_BYTES + 1 &&
                      (uint8_t)PyBytes_AS_STRING(entry)[PREFIX_BYTES + 1] != MUTATION);
}

/* Answers the first requests: `entry` NULL: KEY_ENOENT. Returns 0 with an exception. */
static int answer(const GetRun *self, Run *run, const Asked *asked, size_t count)
{
    size_t bytes[WINDOW_MAX], all_bytes = 0, items = 0;
    Py_ssize_t taken = 0;
    for (size_t i = 0; i < count; i++) {
        bytes[i] = get_answer_bytes(asked[i].entry, &asked[i].request, &run->miss);
        all_bytes += bytes[i];
        items += bytes[i] > 0;
        taken += (Py_ssize_t)get_request_bytes(&asked[i].request);
    }
    int is_done = 1;
    if (items) {
        PyObject *answers = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)all_bytes);
        if (answers == NULL)
            return 0;
        uint8_t *at = (uint8_t *)PyBytes_AS_STRING(answers);
        for (size_t i = 0; i < count; i++)
            if (bytes[i])
                at = get_answer_write(at, asked[i].entry, &asked[i].request, run->known,
                                      &run->miss);
        is_done = !PyList_Append(run->answers, answers);
        Py_DECREF(answers);
    }
    for (size_t i = 1; i < items && is_done; i++)
        is_done = !PyList_Append(run->answers, self->empty);
    if (is_done) {
        run->position += taken;
        run->answered += (Py_ssize_t)count;
    }
    return is_done;
}

/* Completes what is known of a request: the entry is NULL, or may be shown. */
static int complete(GetRun *self, Run *run, Asked *asked)
{
    if (run->value_bytes > run->room_bytes || asked->place == LEFT)
        return -1;
    if (asked->place == IN_STORE && !take_stored(self, asked))
        return 0;
    if (is_removed(asked->entry))
        Py_CLEAR(asked->entry);
    else if (!entry_is_shown(asked->entry, &asked->request, run->known, run->now_s))
        return -1;
    else
        run->value_bytes += (Py_ssize_t)entry_value_bytes(asked->entry, &asked->request);
    run->hits += asked->place == IN_CACHE;
    run->misses += asked->place == IN_STORE;
    return 1;
}

/* Finds documents until the answers are enough. Sets how many were found. Returns 1 if all were. */
static int find_all(GetRun *self, Run *run, Asked *asked, size_t count, size_t *found)
{
    Lookup lookups[2 * WINDOW_MAX];
    size_t looked_up = 0, placed = 0;
    PyObject *trees = NULL;
    for (size_t i = 0; i < count; i++) {
        if ((asked[i].key = get_request_key(&asked[i].request)) == NULL)
            return 0;
        PyObject *dicts[] = {asked[i].newest, asked[i].recent};
        for (int which = 0; which < 2; which++)
            if (PyDict_GET_SIZE(dicts[which]))
                lookups[looked_up++] = (Lookup){dicts[which], PyObject_Hash(asked[i].key), NULL};
    }
    dicts_load(lookups, looked_up);
    int outcome = 1;
    while (placed < count && (outcome = find(self, &asked[placed])) == 1)
        placed++;
    if (outcome && !search_store(self, asked, placed, &trees))
        outcome = 0;
    int each = 1;
    while (outcome && *found < placed && (each = complete(self, run, &asked[*found])) == 1)
        ++*found;
    Py_XDECREF(trees);
    return each == 1 ? outcome : each;
}

/* Answers up to `window` requests. Returns 1 if more may follow. */
static int answer_some(GetRun *self, Run *run, const uint8_t *data, size_t bytes)
{
    Asked asked[WINDOW_MAX];
    size_t count = read_ahead(self, run, asked, data, bytes), loaded = 0, found = 0;
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
    if (count != 10 || !PyBytes_CheckExact(args[0]) || !PyList_CheckExact(args[3]) ||
        !PyBytes_CheckExact(args[9])) {
        PyErr_SetString(PyExc_TypeError, "a run takes bytes, positions, a list, numbers, bytes");
        return NULL;
    }
    Run run = {.answers = args[3]};
    run.position = PyLong_AsSsize_t(args[1]);
    Py_ssize_t end = PyLong_AsSsize_t(args[2]);
    run.known = (uint8_t)PyLong_AsUnsignedLong(args[4]) & GET_DATATYPES;
    run.now_s = PyLong_AsUnsignedLongLong(args[5]);
    run.committed_group = PyLong_AsUnsignedLongLong(args[6]);
    run.room_bytes = PyLong_AsSsize_t(args[7]);
    run.form = (uint8_t)PyLong_AsUnsignedLong(args[8]);
    run.miss = (MissText){(const uint8_t *)PyBytes_AS_STRING(args[9]),
                          (size_t)PyBytes_GET_SIZE(args[9])};
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
    return Py_BuildValue("nnnnn", run.position, run.answered, run.hits, run.misses,
                         run.value_bytes);
}

static PyObject *get_run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *partitions, *trees, *keep, *damaged;
    if (!has_no_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!OOO", &PyList_Type, &partitions, &trees, &keep, &damaged))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    GetRun *self = (GetRun *)allocate(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->partitions = Py_NewRef(partitions);
    self->trees = Py_NewRef(trees);
    self->keep = Py_NewRef(keep);
    self->damaged = Py_NewRef(damaged);
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
    Py_VISIT(self->trees);
    Py_VISIT(self->keep);
    Py_VISIT(self->damaged);
    Py_VISIT(self->partition);
    Py_VISIT(self->layer);
    return 0;
}

static void get_run_dealloc(GetRun *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    PyObject *all[] = {self->partitions, self->empty, self->trees, self->keep, self->damaged};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        Py_XDECREF(all[i]);
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
