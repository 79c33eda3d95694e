/* Sums of the hashes of documents, by their keys. */

#ifndef DCPD_KEY_HASHES_H
#define DCPD_KEY_HASHES_H

#define PY_SSIZE_T_CLEAN
#include "key_tree.h"

#include <Python.h>

PyObject *loops_add_hashes(PyObject *module, PyObject *args);
PyObject *loops_rows_within(PyObject *module, PyObject *args);
PyObject *key_tree_within(KeyTree *self, PyObject *args);
PyObject *key_tree_add_hashes(KeyTree *self, PyObject *args);

#endif
