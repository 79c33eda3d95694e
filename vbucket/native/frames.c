/* See frames.h. Who calls it: vbucket/store/runs.py, which has the same in Python.
   vbucket/native/loops.pyi has the interface. Invariant: nothing outside the given bytes is read;
   if a frame is not a sound mutation, Python does all of them. */

#include "frames.h"

#include "blocks.h"
#include "crc32c.h"

#include <string.h>

#define KEY_AT 55 /* header and extras of a mutation */
#define EXTRAS 31
#define DATATYPE_AT 5
#define BODY_AT 8
#define OPAQUE_AT 12
#define XATTRS 0x04

/* Copies a mutation without the first `unprefixed` bytes of its key, and without its XATTRs if
   `stripped`. Returns how many bytes were written, 0 if the frame is not sound. */
static size_t cut(uint8_t *to, const uint8_t *frame, size_t length, uint32_t opaque,
                  uint32_t unprefixed, int stripped)
{
    if (length < KEY_AT || frame[1] != MUTATION || frame[4] != EXTRAS)
        return 0;
    uint32_t key = be16(frame + 2);
    size_t value_at = KEY_AT + key, section = 0;
    if (length - 24 != be32(frame + BODY_AT) || value_at > length || key < unprefixed)
        return 0;
    if (stripped && frame[DATATYPE_AT] & XATTRS) {
        if (length - value_at < 4 || be32(frame + value_at) > length - value_at - 4)
            return 0;
        section = 4 + (size_t)be32(frame + value_at);
    }
    memcpy(to, frame, KEY_AT);
    put_be(to + 2, key - unprefixed, 2);
    if (section)
        to[DATATYPE_AT] &= (uint8_t)~XATTRS;
    put_be(to + BODY_AT, length - 24 - unprefixed - section, 4);
    put_be(to + OPAQUE_AT, opaque, 4);
    memcpy(to + KEY_AT, frame + KEY_AT + unprefixed, key - unprefixed);
    memcpy(to + value_at - unprefixed, frame + value_at + section, length - value_at - section);
    return length - unprefixed - section;
}

PyObject *loops_cut_frames(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *data, *joined = NULL;
    Py_buffer ends;
    Py_ssize_t low, high;
    unsigned int opaque;
    int unprefixed, stripped;
    if (!PyArg_ParseTuple(args, "Sy*nnIpp", &data, &ends, &low, &high, &opaque, &unprefixed,
                          &stripped))
        return NULL;
    const uint32_t *end = ends.buf;
    const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(data);
    Py_ssize_t count = ends.len / (Py_ssize_t)sizeof(uint32_t);
    if (low < 0 || low >= high || high > count) {
        PyErr_SetString(PyExc_ValueError, "there are no frames with these indexes");
        goto done;
    }
    size_t at = low ? end[low - 1] : 0, stop = end[high - 1], written = 0;
    int is_sound = at < stop && stop <= (size_t)PyBytes_GET_SIZE(data);
    joined = PyByteArray_FromStringAndSize(NULL, is_sound ? (Py_ssize_t)(stop - at) : 0);
    if (joined == NULL)
        goto done;
    uint8_t *to = (uint8_t *)PyByteArray_AS_STRING(joined);
    for (Py_ssize_t i = low; is_sound && i < high; at = end[i++]) {
        size_t more = 0;
        if (end[i] > at && end[i] <= stop)
            more = cut(to + written, bytes + at, end[i] - at, opaque, (uint32_t)unprefixed,
                       stripped);
        written += more;
        is_sound = more != 0;
    }
    if (!is_sound)
        Py_SETREF(joined, Py_NewRef(Py_None));
    else if (PyByteArray_Resize(joined, (Py_ssize_t)written))
        Py_CLEAR(joined);
done:
    PyBuffer_Release(&ends);
    return joined;
}

PyObject *loops_join_frames(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "frames are joined of a body, its checksum and numbers");
        return NULL;
    }
    Py_buffer body, ends;
    unsigned long crc = PyLong_AsUnsignedLong(args[1]), opaque = PyLong_AsUnsignedLong(args[5]);
    Py_ssize_t low = PyLong_AsSsize_t(args[3]), high = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &body, PyBUF_SIMPLE))
        return NULL;
    if (PyObject_GetBuffer(args[2], &ends, PyBUF_SIMPLE)) {
        PyBuffer_Release(&body);
        return NULL;
    }
    const uint32_t *end = ends.buf;
    PyObject *joined = Py_NewRef(Py_None);
    if (low < 0 || low >= high || high > ends.len / (Py_ssize_t)sizeof *end) {
        PyErr_SetString(PyExc_ValueError, "there are no frames with these indexes");
        Py_CLEAR(joined);
        goto done;
    }
    size_t start = low ? end[low - 1] : 0, stop = end[high - 1], at = start;
    if (start >= stop || stop > (size_t)body.len ||
        crc32c(0, body.buf, (size_t)body.len) != (uint32_t)crc)
        goto done;
    Py_SETREF(joined, PyBytes_FromStringAndSize((const char *)body.buf + start,
                                                (Py_ssize_t)(stop - start)));
    if (joined == NULL)
        goto done;
    uint8_t *to = (uint8_t *)PyBytes_AS_STRING(joined);
    for (Py_ssize_t i = low; i < high; at = end[i++]) {
        if (end[i] > stop || end[i] < at || end[i] - at < OPAQUE_AT + 4) {
            Py_SETREF(joined, Py_NewRef(Py_None));
            break;
        }
        put_be(to + (at - start) + OPAQUE_AT, opaque, 4);
    }
done:
    PyBuffer_Release(&body);
    PyBuffer_Release(&ends);
    return joined;
}
