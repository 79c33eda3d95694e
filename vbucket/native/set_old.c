/* What a change replaces: the newest version of its key, from memtable, item cache, store or
   Python. See set_parts.h. Who calls it: set_run.c, which has the rules. */

#include "set_parts.h"

#include "blocks.h"
#include "key_record.h"
#include "stored_documents.h"

#include <string.h>

#define ITEM_OVERHEAD_BYTES 140 /* vbucket/engine/documents/item_cache.py */

static int refused(const SetRun *self)
{
    if (!PyErr_ExceptionMatches(self->damaged))
        return 0;
    PyErr_Clear();
    return -1;
}

int old_of_entry(Old *old, PyObject *entry)
{
    if (!PyBytes_CheckExact(entry))
        return -1;
    if (!PyBytes_GET_SIZE(entry))
        return 1;
    if (PyBytes_GET_SIZE(entry) < NUMBERS_END)
        return -1;
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(entry);
    uint32_t expiry = 0;
    if (at[OPCODE_AT] == MUTATION) {
        if (PyBytes_GET_SIZE(entry) < ENTRY_HEAD_BYTES)
            return -1;
        expiry = be32(at + EXPIRY_AT);
    }
    *old = (Old){be64(at + SEQNO_AT), be64(at + REV_SEQNO_AT), be64(at + CAS_AT), expiry,
                 at[OPCODE_AT], at[DATATYPE_AT]};
    return 1;
}

int old_of_python(const SetRun *self, Old *old, PyObject *part, PyObject *key)
{
    PyObject *args[] = {part, key, Py_None};
    PyObject *meta = PyObject_Vectorcall(self->meta_below, args, 3, NULL);
    if (meta == NULL)
        return refused(self);
    unsigned long long others[2], cas;
    unsigned int opcode = 0, datatype = 0;
    int is_meta = PyTuple_Check(meta) &&
                  PyArg_ParseTuple(meta, "IKIKKKK", &opcode, &others[0], &datatype, &others[1],
                                   &cas, &old->seqno, &old->rev_seqno);
    Py_DECREF(meta);
    old->opcode = (uint8_t)opcode;
    old->datatype = (uint8_t)datatype;
    old->cas = cas;
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
        Py_DECREF(cached);
        if (entry != NULL || PyErr_Occurred())
            return entry != NULL ? CACHED : 0;
    }
    return NOT_IN_MEMORY;
}

int uncache(const SetRun *self, const Planned *planned)
{
    uint64_t size, held, taken;
    const Attribute *of = &self->of[planned->cache + RECENT_BYTES - RECENT];
    PyObject *cached = attribute_get(&self->of[planned->cache], planned->part);
    if (cached == NULL)
        return 0;
    Py_DECREF(cached); /* the partition has it */
    PyObject *entry = PyDict_GetItemWithError(cached, planned->key);
    if (entry == NULL)
        return PyErr_Occurred() ? 0 : CACHED;
    uint64_t bytes = (uint64_t)PyBytes_GET_SIZE(entry) + planned->request.key_bytes;
    bytes += ITEM_OVERHEAD_BYTES;
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

int old_of_cached(const SetRun *self, Planned *planned)
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
            outcome = old_of_entry(&planned->old, entry);
            planned->cache = which;
        }
        Py_DECREF(cached);
        if (outcome != NOT_IN_MEMORY)
            return outcome;
    }
    return CACHED;
}

PyObject *layer_entry(SetRun *self, const Planned *planned)
{
    PyObject *entry = PyDict_GetItemWithError(planned->newest, planned->key), *newest = NULL;
    if (entry != NULL || PyErr_Occurred())
        return entry;
    PyObject *frozen = attribute_get(&self->of[FROZEN], planned->part);
    if (frozen != NULL && Py_IS_TYPE(frozen, self->layer))
        newest = attribute_get(&self->layer_newest, frozen);
    Py_XDECREF(frozen); /* the partition has it */
    Py_XDECREF(newest);
    return newest != NULL && PyDict_CheckExact(newest)
               ? PyDict_GetItemWithError(newest, planned->key)
               : NULL;
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

int old_version(SetRun *self, Old *old, PyObject *part, PyObject *newest, PyObject *key)
{
    *old = (Old){.opcode = DELETION};
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
    if (search->outcome == UNKNOWN ||
        !record_is_sound(search->key, search->key_bytes, at, search->value_bytes))
        return CACHED;
    *old = (Old){be64(at + RECORD_SEQNO_AT), be64(at + RECORD_REV_SEQNO_AT),
                 be64(at + RECORD_CAS_AT), be32(at + RECORD_EXPIRY_AT), at[0], at[1]};
    return 1;
}

int search_store(const SetRun *self, Planned *planned, size_t count)
{
    Search searches[SEARCHES_MAX];
    Planned *of[SEARCHES_MAX];
    size_t searched = 0;
    for (size_t i = 0; i < count; i++)
        if (planned[i].outcome == NOT_IN_MEMORY) {
            Request *request = &planned[i].request;
            put_be(planned[i].full_key, request->vb_id, 2);
            request_key_write(request, planned[i].full_key + 2);
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
    for (size_t i = 0; i < searched; i++) {
        of[i]->outcome = is_key_tree(tree) ? old_of_search(&of[i]->old, &searches[i]) : CACHED;
        if (of[i]->outcome == 1 && searches[i].outcome == ABSENT &&
            request_is_conditional(&of[i]->request) &&
            !record_is_absent((KeyTree *)tree, &searches[i]))
            of[i]->outcome = CACHED; /* a client is told that it is absent */
    }
    Py_DECREF(tree);
    return 1;
}
