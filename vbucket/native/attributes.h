/* Attributes of Python objects whose class has __slots__: read and set without a look-up of their
   names. */

#ifndef DCPD_ATTRIBUTES_H
#define DCPD_ATTRIBUTES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct {
    const char *name;
    Py_ssize_t offset; /* of the slot, in bytes */
} Attribute;

/* Finds out how a class keeps these attributes; names are set. Returns 0 with an exception. */
int attributes_resolve(Attribute *attributes, int count, PyTypeObject *type);

/* The same with these names, for the class of the partitions in a list. Returns a new reference to
   that class, or NULL with an exception. */
PyTypeObject *partitions_resolve(PyObject *partitions, Attribute *attributes,
                                 const char *const *names, int count);

/* Refuses keyword arguments of a constructor. Returns 0 with an exception. */
int has_no_keywords(PyTypeObject *type, PyObject *kwargs);

/* Returns a new reference, or NULL with an exception. */
PyObject *attribute_get(const Attribute *attribute, PyObject *object);

/* Returns 0 with an exception. */
int attribute_set(const Attribute *attribute, PyObject *object, PyObject *value);

/* The same for unsigned numbers of up to 64 bits. */
int attribute_get_number(const Attribute *attribute, PyObject *object, uint64_t *number);
int attribute_set_number(const Attribute *attribute, PyObject *object, uint64_t number);

/* Returns the sum of a number and `more`, or NULL with an exception. Both may be below zero. */
PyObject *attribute_sum(const Attribute *attribute, PyObject *object, int more);

#endif
