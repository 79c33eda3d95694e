/* Documents that only the store knows: see vbucket/engine/recovery/deferred_lookups.py. */

#ifndef DCPD_PRESUMED_H
#define DCPD_PRESUMED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Notes that the store is presumed to have a document, as DeferredLookups.was_document does.
   `presumed` is a dictionary: partition -> keys. Returns 0 with an exception. */
int presume(PyObject *presumed, PyObject *vb_id, PyObject *key);

#endif
