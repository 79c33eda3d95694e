/* See attributes.h. */

#include "attributes.h"

#include <structmember.h>

int attributes_resolve(Attribute *attributes, int count, PyTypeObject *type)
{
    for (int i = 0; i < count; i++) {
        Attribute *attribute = &attributes[i];
        attribute->offset = 0;
        /* Of the class, a descriptor is itself. */
        PyObject *found = PyObject_GetAttrString((PyObject *)type, attribute->name);
        if (found == NULL)
            return 0;
        if (Py_IS_TYPE(found, &PyMemberDescr_Type)) {
            PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
            if (member->type == T_OBJECT_EX)
                attribute->offset = member->offset;
        }
        Py_DECREF(found);
        if (!attribute->offset) {
            PyErr_Format(PyExc_TypeError, "%s.%s is no attribute of a class with slots",
                         type->tp_name, attribute->name);
            return 0;
        }
    }
    return 1;
}

PyTypeObject *partitions_resolve(PyObject *partitions, Attribute *attributes,
                                 const char *const *names, int count)
{
    if (!PyList_GET_SIZE(partitions)) {
        PyErr_SetString(PyExc_ValueError, "there is no partition");
        return NULL;
    }
    for (int i = 0; i < count; i++)
        attributes[i].name = names[i];
    PyTypeObject *type = Py_TYPE(PyList_GET_ITEM(partitions, 0));
    return attributes_resolve(attributes, count, type)
               ? (PyTypeObject *)Py_NewRef((PyObject *)type)
               : NULL;
}

int has_no_keywords(PyTypeObject *type, PyObject *kwargs)
{
    if (kwargs == NULL || !PyDict_GET_SIZE(kwargs))
        return 1;
    PyErr_Format(PyExc_TypeError, "%s() takes no keyword arguments", type->tp_name);
    return 0;
}

PyObject *attribute_get(const Attribute *attribute, PyObject *object)
{
    PyObject *value = *(PyObject **)((char *)object + attribute->offset);
    if (value == NULL)
        PyErr_SetString(PyExc_AttributeError, attribute->name);
    return Py_XNewRef(value);
}

int attribute_set(const Attribute *attribute, PyObject *object, PyObject *value)
{
    PyObject **place = (PyObject **)((char *)object + attribute->offset);
    PyObject *before = *place;
    *place = Py_NewRef(value);
    Py_XDECREF(before);
    return 1;
}

int attribute_get_number(const Attribute *attribute, PyObject *object, uint64_t *number)
{
    PyObject *value = attribute_get(attribute, object);
    if (value == NULL)
        return 0;
    int overflow;
    long quickly = PyLong_AsLongAndOverflow(value, &overflow);
    *number = quickly >= 0 ? (uint64_t)quickly : PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return *number != UINT64_MAX || !PyErr_Occurred();
}

int attribute_set_number(const Attribute *attribute, PyObject *object, uint64_t number)
{
    PyObject *value = PyLong_FromUnsignedLongLong(number);
    int is_set = value != NULL && attribute_set(attribute, object, value);
    Py_XDECREF(value);
    return is_set;
}

PyObject *attribute_sum(const Attribute *attribute, PyObject *object, int more)
{
    PyObject *value = attribute_get(attribute, object), *sum = NULL;
    PyObject *number = value != NULL ? PyLong_FromLong(more) : NULL;
    if (number != NULL)
        sum = PyNumber_Add(value, number);
    Py_XDECREF(number);
    Py_XDECREF(value);
    return sum;
}
