/* Loads what look-ups in dictionaries will read into the processor's caches: of many keys at once,
   so that the waits for memory overlap. It changes nothing, and the look-ups follow as usual. */

#ifndef DCPD_DICT_AHEAD_H
#define DCPD_DICT_AHEAD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define LOOKUPS_MAX 256

typedef struct {
    PyObject *dict; /* a borrowed reference to a dict itself, not to an instance of a subclass */
    Py_hash_t hash; /* of the key */
    const char *at; /* where the next step reads; NULL: there is nothing more to load */
} Lookup;

/* Loads index, entry, key and value, for up to LOOKUPS_MAX look-ups. */
void dicts_load(Lookup *lookups, size_t count);

/* Returns whether this Python's dictionaries look as expected; otherwise `dicts_load` does
   nothing. Returns -1 with an exception. */
int dict_ahead_init(void);

#endif
