/* Runs of changes in what a client received, read in C. */

#ifndef DCPD_CHANGES_H
#define DCPD_CHANGES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *loops_mutations_run(PyObject *module, PyObject *args);
PyObject *loops_stored_run(PyObject *module, PyObject *args);
PyObject *loops_change_places(PyObject *module, PyObject *args);
PyObject *loops_mutation_rows(PyObject *module, PyObject *args);
PyObject *loops_mutation_keys(PyObject *module, PyObject *args);
PyObject *loops_mutation_values(PyObject *module, PyObject *args);
PyObject *loops_mutation_numbers(PyObject *module, PyObject *args);

#endif
