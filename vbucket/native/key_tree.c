/* See key_tree.h. Who calls it: set_run.c, stored_documents.c, vbucket/store/store.py,
   and tests.

   Invariants
   - no byte outside of the file's map is read, whatever the pages have: a page lies within the map,
     and a node within its page;
   - a page on the way has its own number, the type of its level and, where checksums are given,
     the bytes that were written last: it is compared once. A page that does not makes the outcome
     UNKNOWN, and Python looks the key up.

   The caller holds the object, so the map stays; a read transaction pins the state. */

#include "key_tree.h"

#include "blocks.h"
#include "key_hashes.h"
#include "key_record.h"
#include "stored_documents.h"

#include <string.h>

#define PAGE_HEADER_BYTES 16
#define UPPER_AT 14 /* where the data of a page begins */
#define NODE_HEADER_BYTES 8
#define FIRST_PAGE 2 /* the meta pages are before it */
#define BRANCH 1
#define LEAF 2
#define LARGE 1 /* flag of a node: its value has pages of its own */
#define NO_ROOT UINT64_MAX
#define DEPTH_MAX 32
#define PAGE_BYTES_MIN 256
#define PAGE_BYTES_MAX 0x8000
#define SUMS_HEADER_BYTES 16 /* store/lmdb/page_sums.py: the transaction, then checksums */
#define SUMS_TRANSACTION_AT 8
#define FULL_KEY_BYTES_MAX 511 /* LMDB's limit */

/* Numbers are in the byte order of the machine. */
static uint32_t number16(const uint8_t *at)
{
    uint16_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

static uint32_t number32(const uint8_t *at)
{
    uint32_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

/* Returns a page, NULL if it is not within the file. */
static const uint8_t *page_at(const KeyTree *tree, uint64_t number)
{
    if (number < FIRST_PAGE || number > tree->last_page ||
        number >= (size_t)tree->file.len / tree->page_bytes)
        return NULL;
    return (const uint8_t *)tree->file.buf + number * tree->page_bytes;
}

/* Returns the number of the page that a node of a branch names. */
static uint64_t child_of(const uint8_t *node)
{
    return number32(node) | (uint64_t)number16(node + 4) << 32;
}

/* Goes to a page. */
static void descend(const KeyTree *tree, Search *search, uint64_t number)
{
    const uint8_t *page = page_at(tree, number);
    if (page == NULL) {
        search->outcome = UNKNOWN;
        return;
    }
    search->number = number;
    search->page = page;
    PREFETCH(page);
}

/* Returns a node of the page, NULL if it is not within it. */
static const uint8_t *node_at(const KeyTree *tree, const Search *search, uint32_t index)
{
    uint32_t at = number16(search->page + PAGE_HEADER_BYTES + 2 * index);
    if (at < PAGE_HEADER_BYTES + 2 * search->count || at > tree->page_bytes - NODE_HEADER_BYTES)
        return NULL;
    return search->page + at;
}

/* Returns the node in the middle of what is left, NULL if it is not within the page. */
static const uint8_t *middle_node(const KeyTree *tree, const Search *search)
{
    return node_at(tree, search, (search->low + search->high) / 2);
}

/* Whether a node's key and `more` bytes are within the page. */
static int node_fits(const KeyTree *tree, const Search *search, const uint8_t *node, size_t more)
{
    size_t at = (size_t)(node - search->page) + NODE_HEADER_BYTES + number16(node + 6);
    return at <= tree->page_bytes && more <= tree->page_bytes - at;
}

/* Whether a page has the bytes that were written last, as far as its checksum is known; if it is
   not, nothing is proven. */
static int is_written_last(const KeyTree *tree, Search *search)
{
    uint64_t known, number = search->number;
    const uint8_t *sums = tree->sums.buf;
    uint8_t bit = (uint8_t)(1 << (number & 7));
    if (tree->compared != NULL && tree->compared[number / 8] & bit && !search->is_strict)
        return 1;
    if (tree->compared != NULL)
        memcpy(&known, sums + SUMS_TRANSACTION_AT, sizeof known);
    if (tree->compared == NULL || known < tree->transaction) { /* they are being written */
        search->is_proven = 0;
        return 1;
    }
    size_t at = SUMS_HEADER_BYTES + (size_t)number * 4;
    if (at + 4 > (size_t)tree->sums.len ||
        crc32c(0, search->page, tree->page_bytes) != number32(sums + at))
        return 0;
    tree->compared[number / 8] |= bit;
    return 1;
}

/* Checks the head of a page. */
static void begin_page(const KeyTree *tree, Search *search, uint32_t kind)
{
    uint64_t number;
    memcpy(&number, search->page, sizeof number);
    uint32_t flags = number16(search->page + 10), lower = number16(search->page + 12);
    uint32_t least = kind == BRANCH ? 2 : 1; /* nodes */
    if (number != search->number || flags != kind || lower > tree->page_bytes ||
        lower < PAGE_HEADER_BYTES + 2 * least) {
        search->outcome = UNKNOWN;
        return;
    }
    if (!is_written_last(tree, search)) {
        search->outcome = UNKNOWN;
        return;
    }
    search->count = search->high = (lower - PAGE_HEADER_BYTES) / 2;
    search->low = kind == BRANCH; /* the first key of a branch counts as empty */
    for (uint32_t at = CACHE_LINE_BYTES; at < lower; at += CACHE_LINE_BYTES)
        PREFETCH(search->page + at);
}

/* Halves what is left of a page. Returns whether there is more to do. */
static int halve(const KeyTree *tree, Search *search, uint32_t kind)
{
    uint32_t middle = (search->low + search->high) / 2;
    const uint8_t *node = middle_node(tree, search);
    if (node == NULL || !node_fits(tree, search, node, 0)) {
        search->outcome = UNKNOWN;
        return 0;
    }
    size_t key_bytes = number16(node + 6);
    int order = compare(search->key, search->key_bytes, node + NODE_HEADER_BYTES, key_bytes);
    if (!order && kind == LEAF && !search->is_floor) {
        search->value = node + NODE_HEADER_BYTES + key_bytes;
        search->value_bytes = number32(node);
        int is_inside = !number16(node + 4) && node_fits(tree, search, node, search->value_bytes);
        search->outcome = is_inside ? FOUND : UNKNOWN;
        search->is_large = number16(node + 4) == LARGE && node_fits(tree, search, node, 8);
        return 0;
    }
    if (order < 0)
        search->high = middle;
    else
        search->low = middle + 1;
    if (search->low >= search->high)
        return 0;
    node = middle_node(tree, search);
    if (node != NULL)
        PREFETCH(node);
    return 1;
}

/* Goes to the child of a branch where the search has ended. */
static void next_level(const KeyTree *tree, Search *search)
{
    if (search->low < search->count)
        search->to = node_at(tree, search, search->low);
    search->low = search->high = search->low - 1;
    const uint8_t *node = middle_node(tree, search);
    if (search->low)
        search->from = node;
    if (node == NULL)
        search->outcome = UNKNOWN;
    else
        descend(tree, search, child_of(node));
}

void key_tree_search(const KeyTree *tree, Search *searches, size_t count)
{
    Search *active[SEARCHES_MAX], *going[SEARCHES_MAX];
    size_t actives = 0;
    for (size_t i = 0; i < count; i++) {
        searches[i].outcome = ABSENT;
        searches[i].is_proven = 1;
        searches[i].from = searches[i].to = NULL;
        if (tree->root == NO_ROOT)
            continue;
        descend(tree, &searches[i], tree->root);
        if (searches[i].outcome == ABSENT)
            active[actives++] = &searches[i];
    }
    for (unsigned int level = 1; level <= tree->depth; level++) {
        uint32_t kind = level < tree->depth ? BRANCH : LEAF;
        size_t goings = 0, still = 0;
        for (size_t i = 0; i < actives; i++) {
            begin_page(tree, active[i], kind);
            if (active[i]->outcome == ABSENT)
                going[goings++] = active[i];
        }
        while (goings) {
            size_t left = 0;
            for (size_t i = 0; i < goings; i++)
                if (halve(tree, going[i], kind))
                    going[left++] = going[i];
            goings = left;
        }
        for (size_t i = 0; i < actives && kind == BRANCH; i++) {
            if (active[i]->outcome == ABSENT)
                next_level(tree, active[i]);
            if (active[i]->outcome == ABSENT)
                active[still++] = active[i];
        }
        actives = still;
    }
}

int key_tree_node(const KeyTree *tree, const Search *search, int offset, Node *node)
{
    int64_t index = (int64_t)search->low + offset;
    if (tree->root == NO_ROOT || index < 0 || index >= search->count)
        return 0;
    const uint8_t *at = node_at(tree, search, (uint32_t)index);
    if (at == NULL || !node_fits(tree, search, at, 0))
        return 0;
    uint32_t flags = number16(at + 4);
    *node = (Node){at + NODE_HEADER_BYTES, NULL, number16(at + 6), number32(at)};
    node->value = node->key + node->key_bytes;
    if (!flags)
        return node_fits(tree, search, at, node->value_bytes);
    uint64_t number;
    if (flags != LARGE || !node_fits(tree, search, at, sizeof number))
        return 0;
    memcpy(&number, node->value, sizeof number);
    size_t pages = (size_t)tree->file.len / tree->page_bytes;
    if (number < FIRST_PAGE || number > tree->last_page || number >= pages)
        return 0;
    size_t start = (size_t)number * tree->page_bytes + PAGE_HEADER_BYTES;
    node->value = (const uint8_t *)tree->file.buf + start;
    return node->value_bytes <= (size_t)tree->file.len - start;
}

const uint8_t *key_tree_page_ahead(const KeyTree *tree, const Search *search)
{
    return search->to == NULL ? NULL : page_at(tree, child_of(search->to));
}

int key_tree_next_leaf(Search *search)
{
    const uint8_t *to = search->to; /* `halve` has checked it */
    if (to == NULL)
        return 0;
    *search = (Search){.key = to + NODE_HEADER_BYTES, .key_bytes = number16(to + 6)};
    return 1;
}

/* Whether each slot of a page has a node of its own, and the first node begins the data. */
static int slots_are_distinct(const KeyTree *tree, const Search *search)
{
    uint8_t seen[PAGE_BYTES_MAX / 2 / 8];
    uint32_t least = PAGE_BYTES_MAX;
    memset(seen, 0, tree->page_bytes / 2 / 8);
    for (uint32_t i = 0; i < search->count; i++) {
        uint32_t at = number16(search->page + PAGE_HEADER_BYTES + 2 * i);
        if (at & 1 || at >= tree->page_bytes || seen[at / 16] >> (at / 2 & 7) & 1)
            return 0;
        seen[at / 16] |= (uint8_t)(1 << (at / 2 & 7));
        least = at < least ? at : least;
    }
    return least == number16(search->page + UPPER_AT);
}

int key_tree_leaf_fits(const KeyTree *tree, const Search *search)
{
    if (!slots_are_distinct(tree, search))
        return 0;
    const uint8_t *first = node_at(tree, search, 0);
    const uint8_t *last = node_at(tree, search, search->count - 1);
    if (first == NULL || last == NULL || !node_fits(tree, search, first, 0) ||
        !node_fits(tree, search, last, 0))
        return 0;
    const uint8_t *from = search->from, *to = search->to; /* `halve` has checked these */
    return (from == NULL || compare(first + NODE_HEADER_BYTES, number16(first + 6),
                                    from + NODE_HEADER_BYTES, number16(from + 6)) >= 0) &&
           (to == NULL || compare(last + NODE_HEADER_BYTES, number16(last + 6),
                                  to + NODE_HEADER_BYTES, number16(to + 6)) < 0);
}

static PyObject *key_tree_get(KeyTree *self, PyObject *args)
{
    const char *key;
    Py_ssize_t key_bytes;
    if (!PyArg_ParseTuple(args, "y#", &key, &key_bytes))
        return NULL;
    Search search = {.key = (const uint8_t *)key, .key_bytes = (size_t)key_bytes};
    key_tree_search(self, &search, 1);
    if (search.outcome == UNKNOWN)
        Py_RETURN_FALSE;
    if (search.outcome == ABSENT)
        Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)search.value, (Py_ssize_t)search.value_bytes);
}

/* Whether a search has found the sound record of a document. */
static int is_document(const Search *search)
{
    return search->outcome == FOUND &&
           record_is_sound(search->key, search->key_bytes, search->value, search->value_bytes) &&
           search->value[0] == MUTATION;
}

/* Begins searches for some of the keys from `first` on. Returns how many, -1 with an exception. */
static Py_ssize_t begin_searches(const Py_buffer *prefix, PyObject *keys, Py_ssize_t first,
                                 uint8_t (*full_keys)[FULL_KEY_BYTES_MAX], Search *searches)
{
    Py_ssize_t count = 0, size = PyList_GET_SIZE(keys);
    for (; count < SEARCHES_MAX && first + count < size; count++) {
        PyObject *key = PyList_GET_ITEM(keys, first + count);
        if (!PyBytes_CheckExact(key) ||
            prefix->len + PyBytes_GET_SIZE(key) > FULL_KEY_BYTES_MAX) {
            PyErr_SetString(PyExc_ValueError, "this is no key");
            return -1;
        }
        memcpy(full_keys[count], prefix->buf, (size_t)prefix->len);
        memcpy(full_keys[count] + prefix->len, PyBytes_AS_STRING(key),
               (size_t)PyBytes_GET_SIZE(key));
        searches[count] = (Search){.key = full_keys[count]};
        searches[count].key_bytes = (size_t)(prefix->len + PyBytes_GET_SIZE(key));
    }
    return count;
}

/* Appends the row of a sound record to a list. Returns 0 if there is none, -1 with an exception. */
static int take_row(const Search *search, PyObject *rows)
{
    if (search->outcome != FOUND || !record_is_sound(search->key, search->key_bytes, search->value,
                                                     search->value_bytes))
        return 0;
    PyObject *row = Py_BuildValue("y#y#", search->key, (Py_ssize_t)search->key_bytes,
                                  search->value, (Py_ssize_t)search->value_bytes);
    int is_bad = row == NULL || PyList_Append(rows, row);
    Py_XDECREF(row);
    return is_bad ? -1 : 1;
}

static PyObject *key_tree_rows_of(KeyTree *self, PyObject *args)
{
    Py_buffer prefix;
    PyObject *keys;
    int is_new = 0;
    uint8_t full_keys[SEARCHES_MAX][FULL_KEY_BYTES_MAX];
    Search searches[SEARCHES_MAX];
    if (!PyArg_ParseTuple(args, "y*O!|p", &prefix, &PyList_Type, &keys, &is_new))
        return NULL;
    PyObject *rows = PyList_New(0), *unproven = PyList_New(0);
    int is_bad = rows == NULL || unproven == NULL;
    for (Py_ssize_t first = 0, count; !is_bad && first < PyList_GET_SIZE(keys); first += count) {
        count = begin_searches(&prefix, keys, first, full_keys, searches);
        is_bad = count < 0;
        if (!is_bad)
            key_tree_search(self, searches, (size_t)count);
        for (Py_ssize_t i = 0; i < count && !is_bad; i++) {
            int taken = take_row(&searches[i], rows);
            int is_proven = is_new && searches[i].outcome == ABSENT && searches[i].is_proven;
            is_bad = taken < 0 || (!taken && !is_proven && !record_is_absent(self, &searches[i]) &&
                                   PyList_Append(unproven, PyList_GET_ITEM(keys, first + i)));
        }
    }
    PyBuffer_Release(&prefix);
    PyObject *found = is_bad ? NULL : PyTuple_Pack(2, rows, unproven);
    Py_XDECREF(rows);
    Py_XDECREF(unproven);
    return found;
}

static PyObject *key_tree_unproven(KeyTree *self, PyObject *args)
{
    Py_buffer prefix;
    PyObject *keys;
    uint8_t full_keys[SEARCHES_MAX][FULL_KEY_BYTES_MAX];
    Search searches[SEARCHES_MAX];
    if (!PyArg_ParseTuple(args, "y*O!", &prefix, &PyList_Type, &keys))
        return NULL;
    PyObject *unproven = PyList_New(0);
    for (Py_ssize_t first = 0, count; unproven != NULL && first < PyList_GET_SIZE(keys);
         first += count) {
        count = begin_searches(&prefix, keys, first, full_keys, searches);
        if (count < 0)
            Py_CLEAR(unproven);
        else
            key_tree_search(self, searches, (size_t)count);
        for (Py_ssize_t i = 0; i < count && unproven != NULL; i++)
            if (!is_document(&searches[i]) &&
                PyList_Append(unproven, PyList_GET_ITEM(keys, first + i)))
                Py_CLEAR(unproven);
    }
    PyBuffer_Release(&prefix);
    return unproven;
}

static PyObject *key_tree_unsound(KeyTree *self, PyObject *keys)
{
    if (!PyList_Check(keys)) {
        PyErr_SetString(PyExc_TypeError, "a list of keys is needed");
        return NULL;
    }
    PyObject *unsound = PyList_New(0);
    Search last = {.outcome = UNKNOWN}; /* its leaf is sound unless this is its outcome */
    for (Py_ssize_t i = 0; unsound != NULL && i < PyList_GET_SIZE(keys); i++) {
        char *key;
        Py_ssize_t bytes;
        if (PyBytes_AsStringAndSize(PyList_GET_ITEM(keys, i), &key, &bytes) < 0) {
            Py_CLEAR(unsound);
            break;
        }
        Search search = {.key = (const uint8_t *)key, .key_bytes = (size_t)bytes};
        if (last.outcome != UNKNOWN &&
            compare(last.key, last.key_bytes, search.key, search.key_bytes) <= 0 &&
            (last.to == NULL || compare(search.key, search.key_bytes, last.to + NODE_HEADER_BYTES,
                                        number16(last.to + 6)) < 0))
            continue; /* it belongs into the same leaf */
        key_tree_search(self, &search, 1);
        if (search.outcome == UNKNOWN && search.is_large)
            search.outcome = FOUND;
        if (search.outcome == UNKNOWN && PyList_Append(unsound, PyList_GET_ITEM(keys, i)))
            Py_CLEAR(unsound);
        last = search;
    }
    return unsound;
}

static PyObject *key_tree_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Py_buffer file, sums = {0};
    PyObject *sums_from = Py_None;
    unsigned long long page_bytes, last_page, root, transaction = 0;
    unsigned int depth;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "KeyTree() takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "y*KKIK|OK", &file, &page_bytes, &last_page, &depth, &root,
                          &sums_from, &transaction))
        return NULL;
    if (sums_from != Py_None && PyObject_GetBuffer(sums_from, &sums, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&file);
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    KeyTree *self = NULL;
    int is_tree = page_bytes >= PAGE_BYTES_MIN && page_bytes <= PAGE_BYTES_MAX &&
                  depth <= DEPTH_MAX && (depth > 0 || root == NO_ROOT);
    if (!is_tree)
        PyErr_SetString(PyExc_ValueError, "this is not a tree of pages");
    else
        self = (KeyTree *)allocate(type, 0);
    if (self == NULL) {
        PyBuffer_Release(&file);
        PyBuffer_Release(&sums); /* does nothing if there are none */
        return NULL;
    }
    self->file = file;
    self->sums = sums;
    self->transaction = transaction;
    self->compared = NULL;
    if (sums.buf != NULL && sums.len >= SUMS_HEADER_BYTES) {
        self->compared = PyMem_Calloc((size_t)last_page / 8 + 1, 1);
        if (self->compared == NULL) {
            Py_DECREF(self);
            return PyErr_NoMemory();
        }
    }
    self->page_bytes = (size_t)page_bytes;
    self->last_page = last_page;
    self->depth = depth;
    self->root = root;
    return (PyObject *)self;
}

static void key_tree_dealloc(KeyTree *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyBuffer_Release(&self->file);
    PyBuffer_Release(&self->sums);
    PyMem_Free(self->compared);
    release(self);
    Py_DECREF(type);
}

PyObject *loops_page_crcs(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer file;
    unsigned long long page_bytes, summed_bytes;
    PyObject *numbers;
    if (!PyArg_ParseTuple(args, "y*KKO!", &file, &page_bytes, &summed_bytes, &PyList_Type,
                          &numbers))
        return NULL;
    uint64_t size = (uint64_t)file.len, pages = page_bytes ? size / page_bytes + 1 : 0;
    Py_ssize_t count = PyList_GET_SIZE(numbers);
    PyObject *sums = PyList_New(count);
    for (Py_ssize_t i = 0; sums != NULL && i < count; i++) {
        unsigned long long number = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(numbers, i));
        uint64_t at = number < pages ? number * page_bytes : size;
        uint64_t left = at < size ? size - at : 0;
        size_t bytes = (size_t)(summed_bytes < left ? summed_bytes : left);
        PyObject *sum = PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(
            crc32c(0, (const uint8_t *)file.buf + (left ? at : 0), bytes));
        if (sum == NULL)
            Py_CLEAR(sums);
        else
            PyList_SET_ITEM(sums, i, sum);
    }
    PyBuffer_Release(&file);
    return sums;
}

int is_key_tree(PyObject *object)
{
    return PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)key_tree_dealloc;
}

static PyMethodDef methods[] = {
    {"get", (PyCFunction)key_tree_get, METH_VARARGS, NULL},
    {"unsound", (PyCFunction)key_tree_unsound, METH_O, NULL},
    {"unproven", (PyCFunction)key_tree_unproven, METH_VARARGS, NULL},
    {"rows_of", (PyCFunction)key_tree_rows_of, METH_VARARGS, NULL},
    {"within", (PyCFunction)key_tree_within, METH_VARARGS, NULL},
    {"add_hashes", (PyCFunction)key_tree_add_hashes, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, key_tree_new},
    {Py_tp_dealloc, key_tree_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec key_tree_spec = {
    .name = "vbucket.native.loops.KeyTree",
    .basicsize = sizeof(KeyTree),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
