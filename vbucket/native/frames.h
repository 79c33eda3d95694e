/* Stored frames in the form that clients without some features get, made in C. */

#ifndef DCPD_FRAMES_H
#define DCPD_FRAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *loops_cut_frames(PyObject *module, PyObject *args);
PyObject *loops_join_frames(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
