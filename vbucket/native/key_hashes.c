/* See key_hashes.h. Who calls it: vbucket/native/key_hashes.py, which has the same in Python, and
   explains it. vbucket/native/loops.pyi has the interface. Invariant: nothing outside the given
   bytes is read; a row of another form or collection does not count. */

#include "key_hashes.h"

#include "blocks.h"
#include "key_record.h"

#include <string.h>

#define K0 0xa0761d6478bd642fu
#define K1 0xe7037ed1a0b428dbu
#define K2 0x8ebc6af09c88c6e3u
#define K3 0x589965cc75374cc3u
#define BITS_MAX 12
#define ROWS_MAX 4096 /* that `within` returns */
#define LINES_AHEAD 2 /* of the next leaf, loaded for each record of this one */

/* Where the parts of a row are. */
typedef struct {
    const char *prefix; /* of a key; the logical key follows it */
    Py_ssize_t prefix_at, prefix_bytes;
    Py_ssize_t cas_at, rev_at;
    int opcode; /* the first byte of the value of a document; -1: each row is one */
} Form;

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t key_hash(const uint8_t *key, size_t bytes)
{
    uint64_t state = K0 ^ (uint64_t)bytes;
    size_t at = 0;
    for (; at + 8 <= bytes; at += 8)
        state = fold(state ^ le(key + at, 8), K1);
    if (at < bytes)
        state = fold(state ^ le(key + at, (int)(bytes - at)), K1);
    return fold(state ^ K3, K2);
}

/* Whether a row is a document of the form; then `place` is the hash of its key, `hash` its own. */
static int is_document(const uint8_t *key, Py_ssize_t key_bytes, const uint8_t *value,
                       Py_ssize_t bytes, const Form *form, uint64_t *place, uint64_t *hash)
{
    Py_ssize_t start = form->prefix_at + form->prefix_bytes;
    if (key_bytes < start || bytes < form->cas_at + 8 || bytes < form->rev_at + 8 ||
        (form->opcode >= 0 && value[0] != form->opcode) ||
        memcmp(key + form->prefix_at, form->prefix, (size_t)form->prefix_bytes))
        return 0;
    *place = key_hash(key + start, (size_t)(key_bytes - start));
    *hash = fold(fold(*place ^ be64(value + form->cas_at), K1) ^ be64(value + form->rev_at), K3);
    return 1;
}

/* The same of a row in Python. Returns -1 with an exception. */
static int read_row(PyObject *row, const Form *form, uint64_t *place, uint64_t *hash)
{
    if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != 2 ||
        !PyBytes_Check(PyTuple_GET_ITEM(row, 0)) || !PyBytes_Check(PyTuple_GET_ITEM(row, 1))) {
        PyErr_SetString(PyExc_TypeError, "a row is key and value, both bytes");
        return -1;
    }
    PyObject *key = PyTuple_GET_ITEM(row, 0), *value = PyTuple_GET_ITEM(row, 1);
    return is_document((const uint8_t *)PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key),
                       (const uint8_t *)PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), form,
                       place, hash);
}

static int are_in_order(const Form *form)
{
    if (form->prefix_at >= 0 && form->cas_at >= 0 && form->rev_at >= 0)
        return 1;
    PyErr_SetString(PyExc_ValueError, "no part of a row begins before the row");
    return 0;
}

/* Whether there is a byte for each bucket. */
static int are_buckets(PyObject *wanted, unsigned int bits)
{
    if (bits <= BITS_MAX && PyBytes_GET_SIZE(wanted) == (Py_ssize_t)1 << bits)
        return 1;
    PyErr_SetString(PyExc_ValueError, "there is a byte for each bucket");
    return 0;
}

/* Whether there is a sum for each bucket. */
static int are_sums(PyObject *sums, unsigned int bits)
{
    if (bits <= BITS_MAX && PyByteArray_GET_SIZE(sums) == (Py_ssize_t)8 << bits)
        return 1;
    PyErr_SetString(PyExc_ValueError, "there are 8 bytes for each bucket");
    return 0;
}

PyObject *loops_add_hashes(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sums, *rows;
    unsigned int bits;
    int sign;
    Form form;
    if (!PyArg_ParseTuple(args, "O!IO!iny#nni", &PyByteArray_Type, &sums, &bits, &PyList_Type,
                          &rows, &sign, &form.prefix_at, &form.prefix, &form.prefix_bytes,
                          &form.cas_at, &form.rev_at, &form.opcode) ||
        !are_in_order(&form) || !are_sums(sums, bits))
        return NULL;
    uint8_t *buckets = (uint8_t *)PyByteArray_AS_STRING(sums);
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); i++) {
        uint64_t place, hash, sum;
        int is_one = read_row(PyList_GET_ITEM(rows, i), &form, &place, &hash);
        if (is_one < 0)
            return NULL;
        if (!is_one)
            continue;
        uint8_t *at = buckets + 8 * (bits ? place >> (64 - bits) : 0);
        sum = be64(at);
        put_be(at, sign > 0 ? sum + hash : sum - hash, 8);
        count++;
    }
    return PyLong_FromSsize_t(count);
}

PyObject *loops_rows_within(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *rows, *wanted;
    unsigned int bits;
    Form form;
    if (!PyArg_ParseTuple(args, "SIO!ny#nni", &wanted, &bits, &PyList_Type, &rows,
                          &form.prefix_at, &form.prefix, &form.prefix_bytes, &form.cas_at,
                          &form.rev_at, &form.opcode) ||
        !are_in_order(&form) || !are_buckets(wanted, bits))
        return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(rows); i++) {
        uint64_t place, hash;
        PyObject *row = PyList_GET_ITEM(rows, i);
        int is_one = read_row(row, &form, &place, &hash);
        if (is_one > 0)
            is_one = PyBytes_AS_STRING(wanted)[bits ? place >> (64 - bits) : 0];
        if (is_one < 0 || (is_one && PyList_Append(found, row) < 0))
            Py_CLEAR(found);
    }
    return found;
}

/* What becomes of the documents that a walk meets: rows of a list, if `wanted` has a 1 for their
   bucket; or, if `wanted` is NULL, hashes that are added to the sums of their buckets. */
typedef struct {
    Form form;
    unsigned int bits;
    const char *wanted;
    PyObject *found;
    uint8_t *sums;
    Py_ssize_t count; /* of documents that were added */
} Sink;

/* Returns 0 with an exception. */
static int take(Sink *sink, const Node *node)
{
    uint64_t place, hash;
    if (!is_document(node->key, (Py_ssize_t)node->key_bytes, node->value,
                     (Py_ssize_t)node->value_bytes, &sink->form, &place, &hash))
        return 1;
    uint64_t bucket = sink->bits ? place >> (64 - sink->bits) : 0;
    if (sink->wanted == NULL) {
        put_be(sink->sums + 8 * bucket, be64(sink->sums + 8 * bucket) + hash, 8);
        sink->count++;
        return 1;
    }
    if (!sink->wanted[bucket])
        return 1;
    PyObject *row = Py_BuildValue("y#y#", node->key, (Py_ssize_t)node->key_bytes, node->value,
                                  (Py_ssize_t)node->value_bytes);
    int is_appended = row != NULL && PyList_Append(sink->found, row) == 0;
    Py_XDECREF(row);
    return is_appended;
}

enum { ALL_READ, MORE, DAMAGED, RAISED };

/* Gives the sink the documents from `first` to below `stop`, of so many records at most. MORE:
   `next` is the one to go on from. */
static int walk(KeyTree *self, const Node *first, const Node *stop, Py_ssize_t left, Sink *sink,
                Node *next)
{
    Node node = *first; /* the last one; it has no value yet */
    Search search = {.key = node.key, .key_bytes = node.key_bytes};
    do {
        key_tree_search(self, &search, 1);
        if (search.outcome == FOUND)
            search.low = (search.low + search.high) / 2;
        if (search.outcome == UNKNOWN || (search.count && !key_tree_leaf_fits(self, &search)))
            return DAMAGED;
        const uint8_t *ahead = key_tree_page_ahead(self, &search);
        const uint8_t *ahead_end = ahead == NULL ? NULL : ahead + self->page_bytes;
        for (; search.low < search.count; search.low++) {
            for (int i = 0; ahead != ahead_end && i < LINES_AHEAD; i++) {
                PREFETCH(ahead); /* a page has some 40 records, and 64 lines */
                ahead += CACHE_LINE_BYTES;
            }
            if (!key_tree_node(self, &search, 0, next) ||
                compare(next->key, next->key_bytes, node.key, node.key_bytes) <
                    (node.value != NULL)) /* it is not behind the last one */
                return DAMAGED;
            if (compare(next->key, next->key_bytes, stop->key, stop->key_bytes) >= 0)
                return ALL_READ;
            if (left-- <= 0 || (sink->found != NULL && PyList_GET_SIZE(sink->found) == ROWS_MAX))
                return MORE;
            if (!record_is_sound(next->key, next->key_bytes, next->value, next->value_bytes))
                return DAMAGED;
            if (!take(sink, next))
                return RAISED;
            node = *next;
        }
    } while (key_tree_next_leaf(&search));
    return ALL_READ;
}

/* Returns what was found, a new reference, with the key to go on from; None if it is damaged. */
static PyObject *walked(int outcome, PyObject *found, const Node *next)
{
    if (outcome == ALL_READ)
        return Py_BuildValue("NO", found, Py_None);
    if (outcome == MORE)
        return Py_BuildValue("Ny#", found, next->key, (Py_ssize_t)next->key_bytes);
    Py_DECREF(found);
    if (outcome == RAISED)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *key_tree_within(KeyTree *self, PyObject *args)
{
    Node first = {0}, stop = {0}, next;
    Py_ssize_t first_bytes, stop_bytes, left;
    PyObject *wanted;
    Sink sink = {0};
    Form *form = &sink.form;
    if (!PyArg_ParseTuple(args, "y#y#nSIny#nni", &first.key, &first_bytes, &stop.key, &stop_bytes,
                          &left, &wanted, &sink.bits, &form->prefix_at, &form->prefix,
                          &form->prefix_bytes, &form->cas_at, &form->rev_at, &form->opcode) ||
        !are_in_order(form) || !are_buckets(wanted, sink.bits))
        return NULL;
    first.key_bytes = (size_t)first_bytes;
    stop.key_bytes = (size_t)stop_bytes;
    sink.wanted = PyBytes_AS_STRING(wanted);
    sink.found = PyList_New(0);
    if (sink.found == NULL)
        return NULL;
    return walked(walk(self, &first, &stop, left, &sink, &next), sink.found, &next);
}

PyObject *key_tree_add_hashes(KeyTree *self, PyObject *args)
{
    Node first = {0}, stop = {0}, next;
    Py_ssize_t first_bytes, stop_bytes, left;
    PyObject *sums;
    Sink sink = {0};
    Form *form = &sink.form;
    if (!PyArg_ParseTuple(args, "y#y#nO!Iny#nni", &first.key, &first_bytes, &stop.key, &stop_bytes,
                          &left, &PyByteArray_Type, &sums, &sink.bits, &form->prefix_at,
                          &form->prefix, &form->prefix_bytes, &form->cas_at, &form->rev_at,
                          &form->opcode) ||
        !are_in_order(form) || !are_sums(sums, sink.bits))
        return NULL;
    first.key_bytes = (size_t)first_bytes;
    stop.key_bytes = (size_t)stop_bytes;
    sink.sums = (uint8_t *)PyByteArray_AS_STRING(sums);
    int outcome = walk(self, &first, &stop, left, &sink, &next);
    PyObject *count = PyLong_FromSsize_t(sink.count);
    return count == NULL ? NULL : walked(outcome, count, &next);
}
