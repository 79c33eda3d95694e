/* See set_run.h. vbucket/native/loops.pyi has the interface. dcp/session/kv/runs.py calls it;
   that and vbucket/engine/engine.py have the rules, and its twin in Python.

   Invariants
   - no byte outside of [position, end) of the received bytes is read;
   - a request either is applied wholly, or has changed nothing but the item cache, whose entry of
     a key that is about to change is taken. What the loop does not know, or finds damaged, ends
     the run before it; then Python handles the request, and names what is wrong;
   - a request that is refused changes nothing. Its answer waits for what it tells of: `observed`
     gets the partition and its last group;
   - up to `window` requests are planned at once, which reads only, and then applied in order. What
     a plan says of another key than those that were applied since holds until then. The window is
     small after a plan that Python had to carry out, because the plans behind it are lost;
   - objects are made before anything is changed. HIGH_SEQNO is set last, as Keyspace.apply does,
     so `broken_invariant` finds a change that memory was missing for;
   - what is taken from the item cache is subtracted from its `held_bytes` at once. */

#include "set_run.h"

#include "blocks.h"
#include "dict_ahead.h"
#include "set_parts.h"

#define WINDOW_MIN 4 /* what is lost with a plan for Python costs less than that request */
#define VB_ACTIVE 1

static const char *const names[ATTRIBUTES] = {
    "state", "holds", "newest", "append_entry", "frozen", "merged_seqno", "recent", "older",
    "recent_bytes", "older_bytes", "high_seqno", "max_cas", "leader_epoch", "vb_uuid", "last_group",
    "item_count",
};

/* What all requests of a run share. */
typedef struct {
    PyObject *answers, *pending, *touched, *expiring, *observed, *group;
    PyObject *missing, *exists; /* answers of refusals, but for opcode and opaque */
    uint64_t group_number, cas_floor;
    Py_ssize_t room_bytes; /* for new values that are made of present ones */
    Reader reader;
} Run;

/* What a change sets, made before anything is changed. */
typedef struct {
    PyObject *append, *entry, *seqno, *cas;
    PyObject *answer;     /* NULL: there is none */
    PyObject *item_count; /* NULL: the count stays */
    int is_touched; /* whether the group knows the partition */
    int expires;
} Made;

/* Makes what a change sets. Returns 0 with an exception; what is made needs `release` then, too. */
static int make(SetRun *self, const Run *run, const Planned *planned, Made *made, uint64_t cas,
                uint64_t seqno)
{
    PyObject *part = planned->part;
    const Request *request = &planned->request;
    int is_quiet = request->is_quiet;
    int documents = (request->kind != REMOVE) - (planned->old.opcode == MUTATION);
    Stamp stamp = {.cas = cas, .seqno = seqno};
    Content content = {0};
    uint64_t last_group;
    if (!attribute_get_number(&self->of[LEADER_EPOCH], part, &stamp.epoch) ||
        !attribute_get_number(&self->of[VB_UUID], part, &stamp.vb_uuid) ||
        !attribute_get_number(&self->of[LAST_GROUP], part, &last_group))
        return 0;
    if (stamp.epoch > UINT32_MAX)
        return -1;
    int outcome = content_of(self, planned, &content);
    if (outcome != 1)
        return outcome;
    if (content.more_bytes + content.value_bytes > run->reader.value_bytes_max &&
        content.more != NULL)
        return -1; /* too large */
    made->is_touched = last_group == run->group_number;
    made->expires = content.expiry && request->kind != REMOVE;
    made->append = attribute_get(&self->of[APPEND_ENTRY], part);
    made->entry = entry_made(request, &planned->old, &stamp, &content);
    made->answer = is_quiet ? NULL : answer_made(request, &stamp, &content,
                                                   made->entry);
    made->seqno = PyLong_FromUnsignedLongLong(seqno);
    made->cas = PyLong_FromUnsignedLongLong(cas);
    made->item_count = documents ? attribute_sum(&self->of[ITEM_COUNT], part, documents) : NULL;
    return made->append != NULL && made->entry != NULL && (is_quiet || made->answer != NULL) &&
           made->seqno != NULL && made->cas != NULL && (!documents || made->item_count != NULL);
}

static void release(Made *made)
{
    PyObject *all[] = {made->append, made->entry, made->answer, made->seqno, made->cas,
                       made->item_count};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        Py_XDECREF(all[i]);
}

/* Carries out a change. A partition that is touched without a change, or an entry that expires and
   is not stored, does no harm. */
static int change(SetRun *self, const Run *run, const Planned *planned, const Made *made)
{
    PyObject *part = planned->part, *done;
    if ((!made->is_touched && PyList_Append(run->touched, part)) ||
        (made->expires && PyList_Append(run->expiring, made->entry)) ||
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
           (made->answer == NULL || !PyList_Append(run->answers, made->answer));
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
        planned->outcome = old_of_cached(self, planned);
    return planned->outcome;
}

/* Notes that the answers tell of a partition. */
static int observe(const SetRun *self, const Run *run, const Planned *planned)
{
    PyObject *vb_id = PyLong_FromUnsignedLong(planned->request.vb_id);
    PyObject *group = attribute_get(&self->of[LAST_GROUP], planned->part);
    int is_noted = vb_id != NULL && group != NULL && !PyList_Append(run->observed, vb_id) &&
                   !PyList_Append(run->observed, group);
    Py_XDECREF(vb_id);
    Py_XDECREF(group);
    return is_noted;
}

/* Answers a request that is refused. */
static int refuse(SetRun *self, const Run *run, const Planned *planned)
{
    const Request *request = &planned->request;
    if (request->kind >= TOUCH && planned->old.seqno && layer_entry(self, planned) == NULL)
        return PyErr_Occurred() ? 0 : -1; /* that counts as a miss of the item cache */
    PyObject *answer = refusal_made(
        request, planned->status == KEY_ENOENT ? run->missing : run->exists);
    int is_done = answer != NULL && observe(self, run, planned) &&
                  !PyList_Append(run->answers, answer);
    Py_XDECREF(answer);
    return is_done;
}

/* Takes what is replaced from the item cache. */
static int take_cached(SetRun *self, Planned *planned)
{
    int outcome = planned->outcome == CACHED ? CACHED : uncache(self, planned);
    if (outcome != CACHED)
        return outcome;
    return request_is_conditional(&planned->request)
               ? -1
               : old_of_python(self, &planned->old, planned->part, planned->key);
}

static int apply(SetRun *self, Run *run, Planned *planned)
{
    uint64_t high_seqno, max_cas;
    if (!attribute_get_number(&self->of[HIGH_SEQNO], planned->part, &high_seqno) ||
        !attribute_get_number(&self->of[MAX_CAS], planned->part, &max_cas))
        return 0;
    int outcome = settle(self, planned, high_seqno);
    if (outcome == CACHED)
        outcome = take_cached(self, planned);
    if (outcome == 1)
        outcome = judge(planned, run->reader.now_s);
    if (outcome == REFUSED)
        return refuse(self, run, planned);
    if (outcome == 1 && planned->request.kind >= COUNT && planned->cache >= 0)
        outcome = -1;
    if (outcome == 1 && planned->cache >= 0)
        outcome = take_cached(self, planned);
    if (outcome != 1)
        return outcome;
    if (high_seqno == UINT64_MAX || max_cas == UINT64_MAX)
        return -1;
    uint64_t cas = run->cas_floor > max_cas ? run->cas_floor : max_cas + 1;
    Made made = {0};
    outcome = make(self, run, planned, &made, cas, high_seqno + 1);
    if (outcome == 1)
        outcome = change(self, run, planned, &made);
    if (outcome == 1 && planned->request.kind >= COUNT)
        run->room_bytes -= PyBytes_GET_SIZE(made.entry);
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
    PyObject *holds = attribute_get(&self->of[HOLDS], part);
    Py_XDECREF(holds); /* the partition keeps it */
    if (holds == NULL)
        return 0;
    if (state != VB_ACTIVE || !PyDict_Check(holds) || PyDict_GET_SIZE(holds))
        return -1;
    planned->part = Py_NewRef(part);
    if (!attribute_get_number(&self->of[HIGH_SEQNO], part, &planned->high_seqno))
        return 0;
    if (!PyDict_CheckExact(planned->newest))
        return -1;
    planned->outcome = old_version(self, &planned->old, part, planned->newest, planned->key);
    return planned->outcome > 0 ? 1 : planned->outcome;
}

/* Adds the look-ups in other dictionaries that `plan` may make. Returns 0 with an exception. */
static int add_lookups(SetRun *self, PyObject *part, Lookup *lookups, size_t *count,
                       Py_hash_t hash)
{
    PyObject *frozen = attribute_get(&self->of[FROZEN], part), *dicts[3] = {NULL};
    if (frozen == NULL)
        return 0;
    if (Py_IS_TYPE(frozen, self->layer))
        dicts[0] = attribute_get(&self->layer_newest, frozen);
    Py_DECREF(frozen);
    dicts[1] = attribute_get(&self->of[RECENT], part);
    dicts[2] = attribute_get(&self->of[OLDER], part);
    for (int i = 0; i < 3; i++) {
        if (dicts[i] != NULL && PyDict_CheckExact(dicts[i]) && PyDict_GET_SIZE(dicts[i]))
            lookups[(*count)++] = (Lookup){dicts[i], hash, NULL};
        Py_XDECREF(dicts[i]); /* the partition has it */
    }
    return dicts[1] != NULL && dicts[2] != NULL;
}

/* Loads where the partitions' lists of entries end. `append_entry` is a method of one. */
static void load_list_ends(const SetRun *self, const Planned *planned, size_t count)
{
    PyObject *lists[SEARCHES_MAX];
    for (size_t i = 0; i < count; i++) {
        const PyObject *part = PyList_GET_ITEM(self->partitions, planned[i].request.vb_id);
        PyObject *append = *(PyObject **)((char *)part + self->of[APPEND_ENTRY].offset);
        lists[i] = append != NULL && PyCFunction_CheckExact(append) ? PyCFunction_GET_SELF(append)
                                                                    : NULL;
        PREFETCH(lists[i]);
    }
    for (size_t i = 0; i < count; i++)
        if (lists[i] != NULL && PyList_CheckExact(lists[i]))
            PREFETCH(((PyListObject *)lists[i])->ob_item + PyList_GET_SIZE(lists[i]));
}

/* Makes the keys, and loads the memtables of all requests. The numbers are
   objects, too. Returns 0 with an exception. */
static int load(SetRun *self, Planned *planned, size_t count)
{
    static const int objects[] = {APPEND_ENTRY, HIGH_SEQNO, MAX_CAS, VB_UUID, MERGED_SEQNO, FROZEN,
                                  RECENT, OLDER, RECENT_BYTES, OLDER_BYTES};
    Lookup lookups[4 * SEARCHES_MAX];
    size_t looked_up = 0;
    for (size_t i = 0; i < count; i++) {
        PyObject *part = PyList_GET_ITEM(self->partitions, planned[i].request.vb_id);
        planned[i].newest = attribute_get(&self->of[NEWEST], part);
        if (planned[i].newest == NULL)
            return 0;
        for (size_t at = 0; at < sizeof objects / sizeof objects[0]; at++)
            PREFETCH(*(PyObject **)((char *)part + self->of[objects[at]].offset));
    }
    for (size_t i = 0; i < count; i++) {
        const Request *request = &planned[i].request;
        PyObject *part = PyList_GET_ITEM(self->partitions, request->vb_id);
        planned[i].key = PyBytes_FromStringAndSize(NULL, request->key_bytes);
        if (planned[i].key == NULL)
            return 0;
        request_key_write(request, (uint8_t *)PyBytes_AS_STRING(planned[i].key));
        Py_hash_t hash = PyObject_Hash(planned[i].key);
        if (PyDict_CheckExact(planned[i].newest))
            lookups[looked_up++] = (Lookup){planned[i].newest, hash, NULL};
        if (!add_lookups(self, part, lookups, &looked_up, hash))
            return 0;
    }
    dicts_load(lookups, looked_up);
    load_list_ends(self, planned, count);
    return 1;
}

/* Reads requests from `*position` on, and loads what they need. Returns how many there are. */
static size_t read_ahead(const SetRun *self, const Run *run, Planned *planned,
                         const uint8_t *data, size_t bytes)
{
    size_t count = 0, lines = (size_t)self->partition->tp_basicsize / 64;
    for (size_t at = 0; count < self->window; count++) {
        Request *request = &planned[count].request;
        if (!request_read(request, &run->reader, data + at, bytes - at) ||
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
static int apply_some(SetRun *self, Run *run, const uint8_t *data, size_t bytes,
                      Py_ssize_t *taken)
{
    Planned planned[SEARCHES_MAX];
    size_t count = read_ahead(self, run, planned, data, bytes), ready = 0;
    int outcome = count == self->window ? 1 : -1, each;
    for (size_t i = 0; i < count; i++) {
        planned[i].part = planned[i].newest = planned[i].key = NULL;
        planned[i].cache = -1;
    }
    each = load(self, planned, count);
    while (each == 1 && ready < count && (each = plan(self, &planned[ready])) == 1)
        ready++;
    if (each != 1)
        outcome = each;
    if (outcome && !search_store(self, planned, ready))
        outcome = 0;
    for (size_t i = 0; i < ready && outcome && each; i++) {
        if ((each = apply(self, run, &planned[i])) != 1) {
            self->window = WINDOW_MIN;
            outcome = each;
            break;
        }
        *taken += (Py_ssize_t)request_bytes(&planned[i].request);
        if (run->room_bytes <= 0) {
            outcome = -1;
            break;
        }
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

/* Takes the arguments but for data and positions. Returns 0 with an exception. */
static int run_read(const SetRun *self, Run *run, PyObject *const *args, Py_ssize_t count)
{
    static const int lists[] = {3, 4, 5, 12, 14}, bytes[] = {0, 15, 16};
    int is_right = count == 17;
    for (size_t i = 0; is_right && i < sizeof lists / sizeof lists[0]; i++)
        is_right = PyList_CheckExact(args[lists[i]]);
    for (size_t i = 0; is_right && i < sizeof bytes / sizeof bytes[0]; i++)
        is_right = PyBytes_CheckExact(args[bytes[i]]) &&
                   (!i || PyBytes_GET_SIZE(args[bytes[i]]) >= HEADER_BYTES);
    if (!is_right) {
        PyErr_SetString(PyExc_TypeError, "a run takes bytes, positions, lists and numbers");
        return 0;
    }
    *run = (Run){.answers = args[3], .pending = args[4], .touched = args[5], .group = args[6],
                 .expiring = args[12], .observed = args[14], .missing = args[15],
                 .exists = args[16]};
    run->group_number = PyLong_AsUnsignedLongLong(args[6]);
    run->cas_floor = PyLong_AsUnsignedLongLong(args[7]);
    run->reader.json = (uint8_t)PyLong_AsUnsignedLong(args[8]) & DATATYPE_JSON;
    run->reader.value_bytes_max = PyLong_AsUnsignedLongLong(args[9]);
    run->reader.form = (uint8_t)PyLong_AsUnsignedLong(args[10]);
    run->reader.now_s = (uint32_t)PyLong_AsUnsignedLong(args[11]);
    run->reader.partitions = (uint32_t)PyList_GET_SIZE(self->partitions);
    run->room_bytes = PyLong_AsSsize_t(args[13]);
    return !PyErr_Occurred();
}

static PyObject *set_run_apply(SetRun *self, PyObject *const *args, Py_ssize_t count)
{
    Run run;
    if (!run_read(self, &run, args, count))
        return NULL;
    Py_ssize_t position = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    Py_ssize_t room_bytes = run.room_bytes;
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
    return outcome ? Py_BuildValue("(nn)", position, room_bytes - run.room_bytes) : NULL;
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
