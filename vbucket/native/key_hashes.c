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

PyObject *loops_add_hashes(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sums, *rows;
    unsigned int bits;
    int sign;
    Form form;
    if (!PyArg_ParseTuple(args, "O!IO!iny#nni", &PyByteArray_Type, &sums, &bits, &PyList_Type,
                          &rows, &sign, &form.prefix_at, &form.prefix, &form.prefix_bytes,
                          &form.cas_at, &form.rev_at, &form.opcode) ||
        !are_in_order(&form))
        return NULL;
    if (bits > BITS_MAX || PyByteArray_GET_SIZE(sums) != (Py_ssize_t)8 << bits) {
        PyErr_SetString(PyExc_ValueError, "there are 8 bytes for each bucket");
        return NULL;
    }
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

/* Appends a row to the list unless its bucket is not wanted. Returns 0 with an exception. */
static int append_wanted(PyObject *found, const Node *node, const Form *form, unsigned int bits,
                         const char *wanted)
{
    uint64_t place, hash;
    if (!is_document(node->key, (Py_ssize_t)node->key_bytes, node->value,
                     (Py_ssize_t)node->value_bytes, form, &place, &hash) ||
        !wanted[bits ? place >> (64 - bits) : 0])
        return 1;
    PyObject *row = Py_BuildValue("y#y#", node->key, (Py_ssize_t)node->key_bytes, node->value,
                                  (Py_ssize_t)node->value_bytes);
    int is_appended = row != NULL && PyList_Append(found, row) == 0;
    Py_XDECREF(row);
    return is_appended;
}

PyObject *key_tree_within(KeyTree *self, PyObject *args)
{
    const char *first, *stop;
    Py_ssize_t first_bytes, stop_bytes, left;
    PyObject *wanted;
    unsigned int bits;
    Form form;
    if (!PyArg_ParseTuple(args, "y#y#nSIny#nni", &first, &first_bytes, &stop, &stop_bytes, &left,
                          &wanted, &bits, &form.prefix_at, &form.prefix, &form.prefix_bytes,
                          &form.cas_at, &form.rev_at, &form.opcode) ||
        !are_in_order(&form) || !are_buckets(wanted, bits))
        return NULL;
    PyObject *found = PyList_New(0);
    const uint8_t *past = (const uint8_t *)stop;
    Node node = {(const uint8_t *)first, NULL, (size_t)first_bytes, 0}; /* the last one */
    Search search = {.key = node.key, .key_bytes = node.key_bytes};
    int is_over = 0, is_unknown = 0;
    do {
        key_tree_search(self, &search, 1);
        if (search.outcome == FOUND)
            search.low = (search.low + search.high) / 2;
        is_unknown = search.outcome == UNKNOWN ||
                     (search.count && !key_tree_leaf_fits(self, &search));
        for (; found != NULL && !is_unknown && search.low < search.count; search.low++) {
            Node next;
            is_unknown = !key_tree_node(self, &search, 0, &next);
            if (is_unknown)
                break;
            int order = compare(next.key, next.key_bytes, node.key, node.key_bytes);
            is_unknown = order < (node.value != NULL); /* it is not behind the last one */
            is_over = compare(next.key, next.key_bytes, past, (size_t)stop_bytes) >= 0;
            if (is_unknown || is_over)
                break;
            if (left-- <= 0 || PyList_GET_SIZE(found) == ROWS_MAX)
                return Py_BuildValue("Ny#", found, next.key, (Py_ssize_t)next.key_bytes);
            is_unknown = !record_is_sound(next.key, next.key_bytes, next.value, next.value_bytes);
            if (!is_unknown && !append_wanted(found, &next, &form, bits, PyBytes_AS_STRING(wanted)))
                Py_CLEAR(found);
            node = next;
        }
    } while (found != NULL && !is_unknown && !is_over && key_tree_next_leaf(&search));
    if (found == NULL)
        return NULL;
    if (!is_unknown)
        return Py_BuildValue("NO", found, Py_None);
    Py_DECREF(found);
    Py_RETURN_NONE;
}
