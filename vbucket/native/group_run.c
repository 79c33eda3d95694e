/* See group_run.h. vbucket/native/loops.pyi has the interface. vbucket/engine/replicated.py calls
   it; that and failover/replication/messages.py have the rules, and its twins in Python.

   Invariants
   - no byte outside of the payload is read, whatever the lengths in it say;
   - the whole group is checked before anything of it is applied. If anything in it is wrong, or not
     known here, nothing was changed, and Python handles the group: it applies it, or says what is
     wrong with it;
   - changes are applied in the order of the group. What the loop does not apply itself is given to
     Python one by one, in its turn;
   - objects are made before anything is changed. HIGH_SEQNO is set last, as Keyspace.apply does,
     so `broken_invariant` finds a change that memory was missing for. */

#include "group_run.h"

#include "attributes.h"
#include "blocks.h"
#include "group_entry.h"
#include "key_tree.h"
#include "presumed.h"
#include "set_request.h"

#include <string.h>

#define WINDOW 32 /* how many changes are looked up before the first of them is applied */

enum { /* of a partition */
    NEWEST, APPEND_ENTRY, FROZEN, MERGED_SEQNO, HIGH_SEQNO, PURGE_SEQNO, MAX_CAS, LAST_GROUP,
    ITEM_COUNT, ATTRIBUTES
};

static const char *const names[ATTRIBUTES] = {
    "newest", "append_entry", "frozen", "merged_seqno", "high_seqno", "purge_seqno", "max_cas",
    "last_group", "item_count",
};

typedef struct {
    PyObject_HEAD
    PyObject *partitions; /* a list */
    PyObject *presumed;   /* a dictionary: partition -> keys (recovery.deferred_lookups) */
    PyObject *link, *apply_other;
    PyTypeObject *partition, *layer; /* their classes */
    Attribute of[ATTRIBUTES];
    Attribute layer_newest;
} GroupRun;

/* A partition of the group. The references are its own. */
typedef struct {
    PyObject *part, *vb_id; /* NULL: no entry of it was met */
    uint64_t high_seqno;
    uint64_t epoch;
    size_t window; /* the last one with a change of it; they are numbered from 1 */
    int has_purged;
} Member;

/* What all entries of a group share. */
typedef struct {
    const uint8_t *data;
    size_t bytes;
    uint64_t body_bytes_max, group_number;
    PyObject *highs, *epochs, *pending, *touched, *group;
    Member *members; /* by partition */
    uint32_t *order; /* the partitions of the group, as they were met */
    size_t count, met;
    PyObject *linked; /* a list of entries with another previous version; NULL: there are none */
    Py_ssize_t next_linked;
} Group;

/* A change, and what it replaces in memory. The references are its own. */
typedef struct {
    Entry entry;
    Member *member;
    PyObject *linked; /* the entry that is stored instead; NULL: this one */
    PyObject *newest, *key, *before;
    int is_plain; /* whether it is applied here */
    int is_alone; /* whether no earlier change of the window has the same partition */
} Planned;

/* The functions below return 1, 0 with an exception, or -1 for what Python should do. */
enum { PRESUMED = 2 };

static int dict_number(PyObject *dict, PyObject *key, uint64_t *number)
{
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found == NULL)
        return PyErr_Occurred() ? 0 : -1;
    *number = PyLong_AsUnsignedLongLong(found);
    return *number != UINT64_MAX || !PyErr_Occurred();
}

/* Meets a partition for the first time. */
static int meet(const GroupRun *self, Group *group, uint32_t vb_id)
{
    Member *member = &group->members[vb_id];
    PyObject *part = PyList_GET_ITEM(self->partitions, (Py_ssize_t)vb_id);
    if (!Py_IS_TYPE(part, self->partition))
        return -1;
    member->part = Py_NewRef(part);
    group->order[group->met++] = vb_id;
    member->vb_id = PyLong_FromUnsignedLong(vb_id);
    if (member->vb_id == NULL)
        return 0;
    int outcome = dict_number(group->highs, member->vb_id, &member->high_seqno);
    return outcome == 1 ? dict_number(group->epochs, member->vb_id, &member->epoch) : outcome;
}

/* Checks all entries; changes nothing. */
static int check(const GroupRun *self, Group *group)
{
    Entry entry;
    for (size_t at = 0; at < group->bytes; at += entry.bytes) {
        if (!entry_read(&entry, group->data + at, group->bytes - at) ||
            entry.vb_id >= group->count)
            return -1;
        Member *member = &group->members[entry.vb_id];
        int outcome = member->part != NULL ? 1 : meet(self, group, entry.vb_id);
        if (outcome != 1)
            return outcome;
        if (entry.epoch != member->epoch ||
            !entry_follows(&entry, member->high_seqno, group->body_bytes_max))
            return -1;
        member->high_seqno = entry.seqno;
    }
    return 1;
}

/* Checks that partitions are where the link takes them to be. Sets whether any of them has purged
   deletions. */
static int check_partitions(const GroupRun *self, Group *group, int *has_purged)
{
    size_t lines = (size_t)self->partition->tp_basicsize / 64;
    for (size_t i = 0; i < group->met; i++)
        for (size_t line = 0; line <= lines; line++)
            PREFETCH((const char *)group->members[group->order[i]].part + 64 * line);
    for (size_t i = 0; i < group->met; i++) {
        Member *member = &group->members[group->order[i]];
        uint64_t linked, here, purged;
        if (!attribute_get_number(&self->of[HIGH_SEQNO], member->part, &here) ||
            !attribute_get_number(&self->of[PURGE_SEQNO], member->part, &purged))
            return 0;
        int outcome = dict_number(group->highs, member->vb_id, &linked);
        if (outcome != 1 || linked != here)
            return outcome ? -1 : 0;
        member->has_purged = purged != 0;
        *has_purged |= member->has_purged;
    }
    return 1;
}

static int is_linked(const Entry *entry, const Member *member)
{
    return !entry->prev_seqno && member->has_purged;
}

/* Asks Python for the entries that may replace another version here than the master says. */
static int link_entries(const GroupRun *self, Group *group)
{
    if ((group->linked = PyList_New(0)) == NULL)
        return 0;
    Entry entry;
    for (size_t at = 0; at < group->bytes; at += entry.bytes) {
        if (!entry_read(&entry, group->data + at, group->bytes - at))
            return -1;
        const Member *member = &group->members[entry.vb_id];
        if (!is_linked(&entry, member))
            continue;
        PyObject *bytes =
            PyBytes_FromStringAndSize((const char *)entry.at, (Py_ssize_t)entry.bytes);
        PyObject *args[] = {member->part, bytes};
        PyObject *found = bytes != NULL ? PyObject_Vectorcall(self->link, args, 2, NULL) : NULL;
        Py_XDECREF(bytes);
        if (found == NULL)
            return 0;
        int is_entry = PyBytes_CheckExact(found) &&
                       (size_t)PyBytes_GET_SIZE(found) == entry.bytes &&
                       !memcmp(PyBytes_AS_STRING(found) + 8, entry.at + 8, entry.bytes - 8);
        int is_kept = is_entry && !PyList_Append(group->linked, found);
        Py_DECREF(found);
        if (!is_kept)
            return is_entry ? 0 : -1;
    }
    return 1;
}

/* Returns partition -> end seqno, and raises the high seqnos that the link knows. */
static PyObject *raise_highs(const Group *group)
{
    PyObject *ends = PyDict_New();
    for (size_t i = 0; ends != NULL && i < group->met; i++) {
        const Member *member = &group->members[group->order[i]];
        PyObject *seqno = PyLong_FromUnsignedLongLong(member->high_seqno);
        if (seqno == NULL || PyDict_SetItem(ends, member->vb_id, seqno) ||
            PyDict_SetItem(group->highs, member->vb_id, seqno))
            Py_CLEAR(ends);
        Py_XDECREF(seqno);
    }
    return ends;
}

/* Looks for a key in a layer of the memtable. Sets a new reference, or NULL if it is not there. */
static int find(PyObject *newest, PyObject *key, PyObject **entry)
{
    *entry = NULL;
    if (!PyDict_CheckExact(newest))
        return -1;
    PyObject *found = PyDict_GetItemWithError(newest, key);
    if (found == NULL)
        return !PyErr_Occurred();
    if (!PyBytes_CheckExact(found) ||
        (PyBytes_GET_SIZE(found) && PyBytes_GET_SIZE(found) < ENTRY_BODY_AT))
        return -1; /* an empty one says that the key does not exist */
    *entry = Py_NewRef(found);
    return 1;
}

static int find_frozen(GroupRun *self, PyObject *part, PyObject *key, PyObject **entry)
{
    PyObject *frozen = attribute_get(&self->of[FROZEN], part), *newest = NULL;
    if (frozen == NULL)
        return 0;
    int outcome = 1;
    if (frozen != Py_None) {
        if (!Py_IS_TYPE(frozen, self->layer)) {
            outcome = attributes_resolve(&self->layer_newest, 1, Py_TYPE(frozen));
            if (outcome)
                Py_XSETREF(self->layer, (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(frozen)));
        }
        if (outcome)
            newest = attribute_get(&self->layer_newest, frozen);
        outcome = newest != NULL ? find(newest, key, entry) : 0;
    }
    Py_XDECREF(newest);
    Py_DECREF(frozen);
    return outcome;
}

/* Finds the version in memory that a change replaces. */
static int look_up(GroupRun *self, Planned *planned)
{
    Py_CLEAR(planned->before);
    int outcome = find(planned->newest, planned->key, &planned->before);
    if (outcome == 1 && planned->before == NULL)
        outcome = find_frozen(self, planned->member->part, planned->key, &planned->before);
    if (planned->before != NULL)
        PREFETCH(PyBytes_AS_STRING(planned->before));
    return outcome;
}

/* Begins to plan the entry at `at`: loads what it needs. */
static int begin(const GroupRun *self, Group *group, Planned *planned, size_t at, size_t window)
{
    *planned = (Planned){0};
    Entry *entry = &planned->entry;
    if (!entry_read(entry, group->data + at, group->bytes - at)) {
        PyErr_SetString(PyExc_RuntimeError, "the payload has changed");
        return 0;
    }
    Member *member = planned->member = &group->members[entry->vb_id];
    const uint8_t *key = entry->at + ENTRY_BODY_AT + entry->extras_bytes;
    if (is_linked(entry, member)) {
        if (group->next_linked >= PyList_GET_SIZE(group->linked)) {
            PyErr_SetString(PyExc_RuntimeError, "an entry was not linked");
            return 0;
        }
        planned->linked = Py_NewRef(PyList_GET_ITEM(group->linked, group->next_linked++));
        entry->prev_seqno = be64((const uint8_t *)PyBytes_AS_STRING(planned->linked));
    }
    planned->is_alone = member->window != window;
    member->window = window;
    planned->is_plain = !key[0] && entry->opcode != SYSTEM_EVENT &&
                        (entry->opcode != MUTATION || !be32(entry->at + ENTRY_EXPIRY_AT));
    planned->key = PyBytes_FromStringAndSize((const char *)key, entry->key_bytes);
    planned->newest = attribute_get(&self->of[NEWEST], member->part);
    if (planned->key == NULL || planned->newest == NULL)
        return 0;
    if (PyDict_CheckExact(planned->newest))
        PREFETCH(((PyDictObject *)planned->newest)->ma_keys);
    return 1;
}

static PyObject *entry_bytes(const Planned *planned)
{
    if (planned->linked != NULL)
        return Py_NewRef(planned->linked);
    return PyBytes_FromStringAndSize((const char *)planned->entry.at,
                                     (Py_ssize_t)planned->entry.bytes);
}

/* Lets Python apply a change. */
static int apply_other(const GroupRun *self, const Planned *planned)
{
    const Entry *entry = &planned->entry;
    PyObject *bytes = entry_bytes(planned);
    if (bytes == NULL)
        return 0;
    PyObject *change = Py_BuildValue(
        "(OOOKKKO)", planned->member->vb_id, planned->key, bytes, (unsigned long long)entry->seqno,
        (unsigned long long)entry->prev_seqno, (unsigned long long)entry->cas,
        entry->opcode == MUTATION ? Py_True : Py_False);
    Py_DECREF(bytes);
    PyObject *done = change != NULL ? PyObject_CallOneArg(self->apply_other, change) : NULL;
    Py_XDECREF(change);
    Py_XDECREF(done);
    return done != NULL;
}

/* Sets whether the key was a document before, to the best of what memory knows. Returns PRESUMED if
   only the store knows. */
static int was_document(const GroupRun *self, const Planned *planned, int *was)
{
    PyObject *before = planned->before;
    uint64_t merged_seqno = 0;
    *was = before != NULL && PyBytes_GET_SIZE(before) &&
           (uint8_t)PyBytes_AS_STRING(before)[OPCODE_AT] == MUTATION;
    if (before != NULL || !planned->entry.prev_seqno)
        return 1;
    if (!attribute_get_number(&self->of[MERGED_SEQNO], planned->member->part, &merged_seqno))
        return 0;
    *was = merged_seqno != 0;
    return *was ? PRESUMED : 1;
}

/* What a change sets, made before anything is changed. NULL: what is there stays. The number of
   documents may be below zero until the presumed ones are looked up. */
typedef struct {
    PyObject *append, *entry, *seqno, *cas, *item_count;
    int is_touched; /* whether the group knows the partition */
} Made;

static int make(const GroupRun *self, const Group *group, const Planned *planned, Made *made)
{
    PyObject *part = planned->member->part;
    uint64_t last_group, max_cas;
    int was;
    if (!attribute_get_number(&self->of[LAST_GROUP], part, &last_group) ||
        !attribute_get_number(&self->of[MAX_CAS], part, &max_cas))
        return 0;
    made->is_touched = last_group == group->group_number;
    made->append = attribute_get(&self->of[APPEND_ENTRY], part);
    made->entry = entry_bytes(planned);
    made->seqno = PyLong_FromUnsignedLongLong(planned->entry.seqno);
    if (planned->entry.cas > max_cas &&
        (made->cas = PyLong_FromUnsignedLongLong(planned->entry.cas)) == NULL)
        return 0;
    if (made->append == NULL || made->entry == NULL || made->seqno == NULL)
        return 0;
    int outcome = was_document(self, planned, &was);
    int more = (planned->entry.opcode == MUTATION) - was;
    if (outcome && more &&
        (made->item_count = attribute_sum(&self->of[ITEM_COUNT], part, more)) == NULL)
        return 0;
    if (outcome == PRESUMED)
        return presume(self->presumed, planned->member->vb_id, planned->key);
    return outcome;
}

static void release(Made *made)
{
    PyObject *all[] = {made->append, made->entry, made->seqno, made->cas, made->item_count};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        Py_XDECREF(all[i]);
}

/* Carries out a change. A partition that is touched without a change does no harm. */
static int change(const GroupRun *self, const Group *group, const Planned *planned,
                  const Made *made)
{
    PyObject *part = planned->member->part, *done;
    if ((!made->is_touched && PyList_Append(group->touched, part)) ||
        PyList_Append(group->pending, made->entry) ||
        (done = PyObject_CallOneArg(made->append, made->entry)) == NULL)
        return 0;
    Py_DECREF(done);
    return !PyDict_SetItem(planned->newest, planned->key, made->entry) &&
           (made->is_touched || attribute_set(&self->of[LAST_GROUP], part, group->group)) &&
           (made->item_count == NULL ||
            attribute_set(&self->of[ITEM_COUNT], part, made->item_count)) &&
           (made->cas == NULL || attribute_set(&self->of[MAX_CAS], part, made->cas)) &&
           attribute_set(&self->of[HIGH_SEQNO], part, made->seqno);
}

static int apply(GroupRun *self, const Group *group, Planned *planned)
{
    Made made = {0};
    int outcome = planned->is_plain ? 1 : -1;
    if (outcome == 1 && !planned->is_alone)
        outcome = look_up(self, planned); /* an earlier change may have had the same key */
    if (outcome == 1)
        outcome = make(self, group, planned, &made);
    if (outcome == 1)
        outcome = change(self, group, planned, &made);
    release(&made);
    return outcome == -1 ? apply_other(self, planned) : outcome;
}

/* Applies up to WINDOW changes from `*at` on. Returns 0 with an exception. */
static int apply_some(GroupRun *self, Group *group, size_t *at, size_t window)
{
    Planned planned[WINDOW];
    size_t count = 0;
    int outcome = 1;
    while (outcome && count < WINDOW && *at < group->bytes) {
        outcome = begin(self, group, &planned[count], *at, window);
        *at += planned[count++].entry.bytes;
    }
    for (size_t i = 0; outcome && i < count; i++)
        if (planned[i].is_plain) {
            outcome = look_up(self, &planned[i]);
            planned[i].is_plain = outcome == 1;
        }
    for (size_t i = 0; outcome && i < count; i++)
        outcome = apply(self, group, &planned[i]);
    for (size_t i = 0; i < count; i++) {
        PyObject *all[] = {planned[i].linked, planned[i].newest, planned[i].key, planned[i].before};
        for (size_t each = 0; each < sizeof all / sizeof all[0]; each++)
            Py_XDECREF(all[each]);
    }
    return outcome;
}

/* Returns partition -> end seqno, None if Python should apply the group, or NULL. */
static PyObject *apply_group(GroupRun *self, Group *group)
{
    int has_purged = 0, outcome = check(self, group);
    if (outcome == 1)
        outcome = check_partitions(self, group, &has_purged);
    if (outcome == 1 && has_purged)
        outcome = link_entries(self, group);
    if (outcome != 1)
        return outcome ? Py_NewRef(Py_None) : NULL;
    PyObject *ends = raise_highs(group);
    size_t at = 0;
    for (size_t window = 1; ends != NULL && at < group->bytes; window++)
        if (!apply_some(self, group, &at, window))
            Py_CLEAR(ends);
    return ends;
}

static PyObject *group_run_apply(GroupRun *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 7 || !PyBytes_CheckExact(args[0]) || !PyDict_CheckExact(args[1]) ||
        !PyDict_CheckExact(args[2]) || !PyList_CheckExact(args[4]) || !PyList_CheckExact(args[5])) {
        PyErr_SetString(PyExc_TypeError, "a group takes bytes, dictionaries, lists and numbers");
        return NULL;
    }
    Group group = {.data = (const uint8_t *)PyBytes_AS_STRING(args[0]),
                   .bytes = (size_t)PyBytes_GET_SIZE(args[0]), .highs = args[1],
                   .epochs = args[2], .pending = args[4], .touched = args[5], .group = args[6]};
    group.body_bytes_max = PyLong_AsUnsignedLongLong(args[3]);
    group.group_number = PyLong_AsUnsignedLongLong(args[6]);
    if (PyErr_Occurred())
        return NULL;
    group.count = (size_t)PyList_GET_SIZE(self->partitions);
    group.members = PyMem_Calloc(group.count, sizeof *group.members);
    group.order = PyMem_Calloc(group.count, sizeof *group.order);
    PyObject *ends = NULL;
    if (group.members != NULL && group.order != NULL)
        ends = apply_group(self, &group);
    else
        PyErr_NoMemory();
    for (size_t i = 0; i < group.met; i++) {
        Py_XDECREF(group.members[group.order[i]].part);
        Py_XDECREF(group.members[group.order[i]].vb_id);
    }
    Py_XDECREF(group.linked);
    PyMem_Free(group.members);
    PyMem_Free(group.order);
    return ends;
}

static PyObject *group_run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *partitions, *presumed, *link, *other;
    if (!has_no_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!O!OO", &PyList_Type, &partitions, &PyDict_Type, &presumed, &link,
                          &other))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    GroupRun *self = (GroupRun *)allocate(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->partitions = Py_NewRef(partitions);
    self->presumed = Py_NewRef(presumed);
    self->link = Py_NewRef(link);
    self->apply_other = Py_NewRef(other);
    self->partition = partitions_resolve(partitions, self->of, names, ATTRIBUTES);
    self->layer_newest.name = names[NEWEST];
    if (self->partition == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int group_run_traverse(GroupRun *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->partitions);
    Py_VISIT(self->presumed);
    Py_VISIT(self->link);
    Py_VISIT(self->apply_other);
    Py_VISIT(self->partition);
    Py_VISIT(self->layer);
    return 0;
}

static void group_run_dealloc(GroupRun *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->link);
    Py_XDECREF(self->apply_other);
    Py_XDECREF(self->partitions);
    Py_XDECREF(self->presumed);
    Py_XDECREF(self->partition);
    Py_XDECREF(self->layer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"apply", (PyCFunction)(void (*)(void))group_run_apply, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, group_run_new},
    {Py_tp_dealloc, group_run_dealloc},
    {Py_tp_traverse, group_run_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec group_run_spec = {
    .name = "vbucket.native.loops.GroupRun",
    .basicsize = sizeof(GroupRun),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
