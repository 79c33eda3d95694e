/* What compaction does for each version of a block. */

#ifndef DCPD_COMPACTION_H
#define DCPD_COMPACTION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec superseded_spec;

PyObject *loops_repack(PyObject *module, PyObject *args);

#endif
