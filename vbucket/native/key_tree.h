/* The type `KeyTree`: looks up keys in a table of LMDB's file (store/lmdb/lmdb_pages.py). */

#ifndef DCPD_KEY_TREE_H
#define DCPD_KEY_TREE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define CACHE_LINE_BYTES 64
#define SEARCHES_MAX 64 /* at once: enough for waits for memory to overlap */

#if defined(__GNUC__)
#define PREFETCH(at) __builtin_prefetch(at)
#else
#define PREFETCH(at) ((void)(at))
#endif

typedef struct {
    PyObject_HEAD
    Py_buffer file;
    uint64_t last_page, root;
    size_t page_bytes;
    unsigned int depth;
    Py_buffer sums;       /* vbucket/store/lmdb/page_sums.py; `buf` is NULL if there are none */
    uint64_t transaction; /* of the state */
    uint8_t *compared;    /* a bit for each page: it was compared with its checksum */
} KeyTree;

enum { ABSENT = 0, FOUND = 1, UNKNOWN = -1 /* a page is not as it should be */ };

/* A key to look for; the rest is set by `key_tree_search`. The value lies in the file. */
typedef struct {
    const uint8_t *key;
    size_t key_bytes;
    int outcome;
    const uint8_t *value;
    size_t value_bytes;
    int is_floor; /* 1: do not end at the key itself; the node before the place counts */
    const uint8_t *page;
    uint64_t number;
    uint32_t low, high, count;
    const uint8_t *from, *to; /* nodes of branches: the leaf's keys are from one to below the other;
                                 NULL: there is no such bound */
    int is_large; /* found, but its value has pages of its own */
    int is_strict; /* 1: compare all pages on the way with their checksums, also those that were */
    int is_proven; /* all pages on the way were compared */
} Search;

/* A node of a leaf. The value may lie on pages of its own. */
typedef struct {
    const uint8_t *key, *value;
    size_t key_bytes, value_bytes;
} Node;

/* Compares keys as LMDB does. */
static inline int compare(const uint8_t *one, size_t one_bytes, const uint8_t *other,
                          size_t other_bytes)
{
    int order = memcmp(one, other, one_bytes < other_bytes ? one_bytes : other_bytes);
    return order ? order : (one_bytes > other_bytes) - (one_bytes < other_bytes);
}

/* Looks for up to SEARCHES_MAX keys together, level by level, so that what one of them waits for
   is loaded while the others are compared. */
void key_tree_search(const KeyTree *tree, Search *searches, size_t count);

/* Reads the node beside the place where a search ended that found nothing: 0 is the one at or
   behind it, -1 the one before. Returns 0 if it is not in that leaf, or is damaged. */
int key_tree_node(const KeyTree *tree, const Search *search, int offset, Node *node);

/* Whether the keys of the leaf where a search ended are within its bounds, and no node is there
   twice. */
int key_tree_leaf_fits(const KeyTree *tree, const Search *search);

/* Returns the page that follows the leaf where a search ended, as far as the way there tells; NULL:
   none. It is for PREFETCH alone: it may be none of this tree's leaves. */
const uint8_t *key_tree_page_ahead(const KeyTree *tree, const Search *search);

/* Begins a search for the first key of the next leaf. Returns 0 if there is none. */
int key_tree_next_leaf(Search *search);

/* page_crcs(file, page_bytes, summed_bytes, numbers) -> [crc]: of the first bytes of pages. */
PyObject *loops_page_crcs(PyObject *self, PyObject *args);

int is_key_tree(PyObject *object);

extern PyType_Spec key_tree_spec;

#endif
