/* What a merge changes in collections. */

#ifndef DCPD_COUNTS_H
#define DCPD_COUNTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define COLLECTIONS_MAX 64 /* in one merge of a partition; with more of them Python does it */

/* What a merge changes in a collection other than the default one. */
typedef struct {
    uint32_t id;
    uint64_t high_seqno;
    Py_ssize_t documents;
} Collection;

/* The same for all of them, in the order in which they are met. The seqnos are those of
   vbucket/model/collection_counts.py. */
typedef struct {
    Collection items[COLLECTIONS_MAX];
    size_t count;
    uint64_t other_high_seqno, default_high_seqno;
} Others;

/* Returns the collection of a key, adding it if need be; NULL if there are too many, or the key
   does not begin with a collection id in its shortest form. */
Collection *collection_of(Others *others, const uint8_t *key, uint32_t key_bytes);

/* Returns (other high seqno, default high seqno, [(id, high seqno, documents)]). */
PyObject *others_tuple(const Others *others);

#endif
