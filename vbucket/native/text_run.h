/* Commands of memcached's text protocol as requests of the binary one, and its answers as text. */

#ifndef DCPD_TEXT_RUN_H
#define DCPD_TEXT_RUN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *loops_text_changes(PyObject *module, PyObject *args);
PyObject *loops_text_gets(PyObject *module, PyObject *args);
PyObject *loops_text_values(PyObject *module, PyObject *args);
PyObject *loops_text_outcomes(PyObject *module, PyObject *answers);

#endif
