/* Frames that come from elsewhere, as entries (vbucket/engine/bulk.py says what they hold). */

#ifndef DCPD_FRAMES_H
#define DCPD_FRAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *loops_entries_of(PyObject *module, PyObject *args);

#endif
