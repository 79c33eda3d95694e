/* Whether a text is one JSON value. The Python that defines it is vbucket/model/json_value.py. */

#ifndef DCPD_JSON_TEXT_H
#define DCPD_JSON_TEXT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* Whether bytes are one JSON value in UTF-8 (RFC 8259), with white space around it, and at most
   JSON_LEVELS_MAX containers within one another. */
int json_is_sound(const uint8_t *text, size_t bytes);

/* The same for an object with the buffer interface. */
PyObject *py_is_json(PyObject *module, PyObject *text);

/* A packet of frames (engine.loading.bulk) whose mutations have the JSON bit by their values. */
PyObject *py_mark_json(PyObject *module, PyObject *args);

#endif
