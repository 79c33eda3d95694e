/* See compaction.h. Who calls it: vbucket/upkeep/compaction.py. vbucket/native/loops.pyi has the
   interface. Invariant: a block whose bytes are not what was written is left to Python, which says
   so. */

#include "compaction.h"

#include "blocks.h"

#include <string.h>

/* A set of seqnos: open addressing, at most half full; 0 marks a free place, so it is no member. */
typedef struct {
    PyObject_HEAD
    uint64_t *places;
    size_t room, count; /* room: a power of two, or 0 */
} Superseded;

static size_t place_of(const Superseded *self, uint64_t seqno)
{
    return (size_t)(seqno * 0x9E3779B97F4A7C15u >> 20) & (self->room - 1);
}

static int grow(Superseded *self, size_t more)
{
    size_t room = self->room ? self->room : 256;
    while (room < 2 * (self->count + more))
        room *= 2;
    if (room == self->room)
        return 1;
    uint64_t *before = self->places;
    size_t before_room = self->room;
    uint64_t *places = PyMem_Calloc(room, sizeof(uint64_t));
    if (places == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    self->places = places;
    self->room = room;
    for (size_t i = 0; i < before_room; i++)
        if (before[i]) {
            size_t at = place_of(self, before[i]);
            while (places[at])
                at = (at + 1) & (room - 1);
            places[at] = before[i];
        }
    PyMem_Free(before);
    return 1;
}

static void add(Superseded *self, uint64_t seqno)
{
    size_t at = place_of(self, seqno);
    while (self->places[at] && self->places[at] != seqno)
        at = (at + 1) & (self->room - 1);
    self->count += !self->places[at];
    self->places[at] = seqno;
}

/* Removes a seqno; returns whether it was there. */
static int take(Superseded *self, uint64_t seqno)
{
    size_t mask = self->room - 1, at = place_of(self, seqno);
    while (self->places[at] != seqno) {
        if (!self->places[at])
            return 0;
        at = (at + 1) & mask;
    }
    /* Move what follows down, so that it is still found. */
    for (size_t next = (at + 1) & mask; self->places[next]; next = (next + 1) & mask)
        if (((next - place_of(self, self->places[next])) & mask) >= ((next - at) & mask)) {
            self->places[at] = self->places[next];
            at = next;
        }
    self->places[at] = 0;
    self->count--;
    return 1;
}

static PyObject *superseded_mark(Superseded *self, PyObject *args)
{
    const char *key, *value;
    Py_ssize_t key_bytes, bytes;
    unsigned long long floor;
    Block block;
    if (!PyArg_ParseTuple(args, "y#y#K", &key, &key_bytes, &value, &bytes, &floor))
        return NULL;
    if (!block_open(&block, (const uint8_t *)key, (size_t)key_bytes, (const uint8_t *)value,
                    (size_t)bytes)) {
        PyErr_SetString(PyExc_ValueError, "this is not a block");
        return NULL;
    }
    if (!grow(self, block.count))
        return NULL;
    uint32_t low = 0;
    for (; low < block.count && block_seqno(&block, low) <= floor; low++) {
        uint64_t seqno = le(block.prev_seqnos + 8 * (size_t)low, 8);
        if (seqno)
            add(self, seqno);
    }
    PyObject *kept = PyBytes_FromStringAndSize(NULL, block.count);
    if (kept == NULL)
        return NULL;
    memset(PyBytes_AS_STRING(kept), 1, block.count);
    int is_any = 0;
    for (uint32_t i = 0; i < low; i++)
        if (take(self, block_seqno(&block, i)))
            PyBytes_AS_STRING(kept)[i] = (char)!++is_any;
    if (is_any)
        return kept;
    Py_DECREF(kept);
    Py_RETURN_NONE;
}

static PyObject *superseded_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, "") || (kwargs != NULL && PyDict_GET_SIZE(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "Superseded() takes no arguments");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0); /* all zero */
}

static void superseded_dealloc(Superseded *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyMem_Free(self->places);
    release(self);
    Py_DECREF(type);
}

/* Adds what is kept of the blocks from `*next` on that have one epoch. Returns 1, 0 with an
   exception, or -1 for what Python should do. */
static int add_epoch(Versions *versions, PyObject *parts, Py_ssize_t *next, uint32_t *epoch)
{
    for (Py_ssize_t first = *next; *next < PyList_GET_SIZE(parts); ++*next) {
        const char *key, *value;
        Py_ssize_t key_bytes, bytes;
        PyObject *mask;
        Block block;
        if (!PyTuple_Check(PyList_GET_ITEM(parts, *next)) ||
            !PyArg_ParseTuple(PyList_GET_ITEM(parts, *next), "y#y#O", &key, &key_bytes, &value,
                              &bytes, &mask))
            return 0;
        if (!block_open(&block, (const uint8_t *)key, (size_t)key_bytes, (const uint8_t *)value,
                        (size_t)bytes) ||
            !block_body_is_sound(&block))
            return -1;
        if (mask != Py_None &&
            (!PyBytes_Check(mask) || PyBytes_GET_SIZE(mask) != (Py_ssize_t)block.count))
            return -1;
        if (*next == first)
            *epoch = block.epoch;
        else if (*epoch != block.epoch)
            break;
        const char *kept = mask == Py_None ? NULL : PyBytes_AS_STRING(mask);
        if (!versions_add_block(versions, &block, (const uint8_t *)kept))
            return 0;
    }
    return 1;
}

PyObject *loops_repack(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long vb_id;
    unsigned long long seqno_before, target;
    PyObject *parts, *blocks = PyList_New(0);
    Versions versions = {NULL, 0, 0};
    int outcome = blocks != NULL && PyArg_ParseTuple(args, "kO!KK", &vb_id, &PyList_Type, &parts,
                                                     &seqno_before, &target);
    for (Py_ssize_t next = 0; outcome == 1 && next < PyList_GET_SIZE(parts);) {
        uint32_t epoch = 0;
        versions.count = 0;
        outcome = add_epoch(&versions, parts, &next, &epoch);
        if (outcome == 1)
            outcome = blocks_build(blocks, &versions, (uint32_t)vb_id, epoch, seqno_before,
                                   (size_t)target);
        if (outcome == 1 && versions.count)
            seqno_before = versions.items[versions.count - 1].seqno;
    }
    PyMem_Free(versions.items);
    if (outcome == 1)
        return blocks;
    Py_XDECREF(blocks);
    return outcome == -1 ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"mark", (PyCFunction)superseded_mark, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, superseded_new},
    {Py_tp_dealloc, superseded_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec superseded_spec = {
    .name = "vbucket.native.loops.Superseded",
    .basicsize = sizeof(Superseded),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
