/* See changes.h. Who calls it: clients/streaming/change_runs.py, which has the same in Python.
   vbucket/native/loops.pyi has the interface. Invariant: nothing outside the given bytes is read;
   a frame that is incomplete, or not what it should be, ends a run and is left to Python. */

#include "changes.h"

#include "blocks.h"

#define REQUEST 0x80
#define HEAD_BYTES 24
#define SEQNO_STOP 32 /* the seqno is the first field after the header */
#define MUTATION_EXTRAS 31
#define XATTRS 0x04 /* in the datatype */

typedef struct {
    const uint8_t *bytes;
    Py_ssize_t at, end;
} Range;

/* Whether at and end are a range of data. If not, an exception is set. */
static int is_range(PyObject *data, Py_ssize_t at, Py_ssize_t end)
{
    if (at >= 0 && at <= end && end <= PyBytes_GET_SIZE(data))
        return 1;
    PyErr_SetString(PyExc_ValueError, "the range is not inside the bytes");
    return 0;
}

/* Where the frame at `at` stops, 0 if it is incomplete. SEQNO_STOP bytes of it must be there. */
static Py_ssize_t stop_of(const Range *range, Py_ssize_t at)
{
    uint32_t body = be32(range->bytes + at + 8);
    return body <= (size_t)(range->end - at - HEAD_BYTES) ? at + HEAD_BYTES + (Py_ssize_t)body : 0;
}

static int is_plain_mutation(const uint8_t *frame, const uint8_t *first)
{
    return frame[1] == MUTATION && frame[4] == MUTATION_EXTRAS && !(frame[5] & XATTRS) &&
           be16(frame + 6) == be16(first + 6) &&
           be32(frame + 8) >= MUTATION_EXTRAS + be16(frame + 2);
}

static int is_stored(const uint8_t *frame, const uint8_t *Py_UNUSED(first))
{
    return (frame[1] >= MUTATION && frame[1] <= EXPIRATION) || frame[1] == SYSTEM_EVENT;
}

static PyObject *run(PyObject *args, int (*belongs)(const uint8_t *, const uint8_t *))
{
    PyObject *data;
    Py_ssize_t at, end, count = 0;
    unsigned long long last, limit;
    if (!PyArg_ParseTuple(args, "SnnKK", &data, &at, &end, &last, &limit) ||
        !is_range(data, at, end))
        return NULL;
    Range range = {(const uint8_t *)PyBytes_AS_STRING(data), at, end};
    const uint8_t *first = range.bytes + at;
    while (end - at >= SEQNO_STOP) {
        const uint8_t *frame = range.bytes + at;
        uint64_t seqno = be64(frame + HEAD_BYTES);
        Py_ssize_t stop = stop_of(&range, at);
        if (frame[0] != REQUEST || stop < at + SEQNO_STOP || be32(frame + 12) != be32(first + 12) ||
            seqno <= last || seqno > limit || !belongs(frame, first))
            break;
        last = seqno;
        at = stop;
        count++;
    }
    return Py_BuildValue("nnK", at, count, last);
}

PyObject *loops_mutations_run(PyObject *Py_UNUSED(module), PyObject *args)
{
    return run(args, is_plain_mutation);
}

PyObject *loops_stored_run(PyObject *Py_UNUSED(module), PyObject *args)
{
    return run(args, is_stored);
}

static int is_document_change(const uint8_t *frame)
{
    uint32_t extras = frame[4];
    int is_known = frame[1] == MUTATION     ? extras == MUTATION_EXTRAS
                   : frame[1] == DELETION   ? extras == 18 || extras == 21
                   : frame[1] == EXPIRATION ? extras == 20
                                            : 0;
    return frame[0] == REQUEST && is_known && be32(frame + 8) >= extras + be16(frame + 2);
}

PyObject *loops_change_places(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *data;
    Py_ssize_t at, end;
    if (!PyArg_ParseTuple(args, "Snn", &data, &at, &end) || !is_range(data, at, end))
        return NULL;
    Range range = {(const uint8_t *)PyBytes_AS_STRING(data), at, end};
    size_t count = 0, room = (size_t)(end - at) / SEQNO_STOP;
    int64_t *places = PyMem_Malloc((room ? room : 1) * sizeof(int64_t));
    if (places == NULL)
        return PyErr_NoMemory();
    while (end - at >= SEQNO_STOP && is_document_change(range.bytes + at)) {
        Py_ssize_t stop = stop_of(&range, at);
        if (!stop)
            break;
        places[count++] = at;
        at = stop;
    }
    PyObject *found = Py_BuildValue("y#n", (const char *)places,
                                    (Py_ssize_t)(count * sizeof(int64_t)), at);
    PyMem_Free(places);
    return found;
}

/* Makes something of a frame (where it begins and stops), with two numbers for the details. */
typedef PyObject *(*Make)(const uint8_t *, const uint8_t *, Py_ssize_t, Py_ssize_t);

/* Makes a list of what `make` returns for each of `count` mutations from `at` on. */
static PyObject *column(PyObject *data, Py_ssize_t at, Py_ssize_t count, Py_ssize_t detail,
                        Py_ssize_t width, Make make)
{
    if (!is_range(data, at, PyBytes_GET_SIZE(data)))
        return NULL;
    Range range = {(const uint8_t *)PyBytes_AS_STRING(data), at, PyBytes_GET_SIZE(data)};
    const Py_ssize_t least = HEAD_BYTES + MUTATION_EXTRAS;
    if (count < 0 || count > (range.end - at) / least)
        return PyErr_Format(PyExc_ValueError, "there are no %zd mutations here", count);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = NULL;
        Py_ssize_t stop = range.end - at >= least ? stop_of(&range, at) : 0;
        if (stop && stop >= at + least + (Py_ssize_t)be16(range.bytes + at + 2))
            item = make(range.bytes + at, range.bytes + stop, detail, width);
        else
            PyErr_SetString(PyExc_ValueError, "a frame here is not a mutation");
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item);
        at = stop;
    }
    return list;
}

static PyObject *key(const uint8_t *frame, const uint8_t *Py_UNUSED(stop), Py_ssize_t skipped,
                     Py_ssize_t Py_UNUSED(width))
{
    Py_ssize_t length = be16(frame + 2), skip = skipped < length ? skipped : length;
    const uint8_t *begin = frame + HEAD_BYTES + MUTATION_EXTRAS + skip;
    return PyBytes_FromStringAndSize((const char *)begin, length - skip);
}

static PyObject *value(const uint8_t *frame, const uint8_t *stop, Py_ssize_t Py_UNUSED(detail),
                       Py_ssize_t Py_UNUSED(width))
{
    const uint8_t *begin = frame + HEAD_BYTES + MUTATION_EXTRAS + be16(frame + 2);
    return PyBytes_FromStringAndSize((const char *)begin, stop - begin);
}

static PyObject *number(const uint8_t *frame, const uint8_t *Py_UNUSED(stop), Py_ssize_t offset,
                        Py_ssize_t width)
{
    uint64_t found = 0;
    for (Py_ssize_t i = 0; i < width; i++)
        found = found << 8 | frame[offset + i];
    return PyLong_FromUnsignedLongLong(found);
}

static PyObject *skipping(PyObject *args, Make make)
{
    PyObject *data;
    Py_ssize_t at, count, skipped;
    if (!PyArg_ParseTuple(args, "Snnn", &data, &at, &count, &skipped))
        return NULL;
    if (skipped < 0)
        return PyErr_Format(PyExc_ValueError, "%zd bytes cannot be skipped", skipped);
    return column(data, at, count, skipped, 0, make);
}

static PyObject *row(const uint8_t *frame, const uint8_t *stop, Py_ssize_t skipped,
                     Py_ssize_t width)
{
    return Py_BuildValue("(iNNKKKIIi)", (int)be16(frame + 6), key(frame, stop, skipped, width),
                         value(frame, stop, 0, 0), be64(frame + 24), be64(frame + 32),
                         be64(frame + 16), be32(frame + 40), be32(frame + 44), (int)frame[5]);
}

PyObject *loops_mutation_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    return skipping(args, row);
}

PyObject *loops_mutation_keys(PyObject *Py_UNUSED(module), PyObject *args)
{
    return skipping(args, key);
}

PyObject *loops_mutation_values(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *data;
    Py_ssize_t at, count;
    if (!PyArg_ParseTuple(args, "Snn", &data, &at, &count))
        return NULL;
    return column(data, at, count, 0, 0, value);
}

PyObject *loops_mutation_numbers(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *data;
    Py_ssize_t at, count, offset, width;
    if (!PyArg_ParseTuple(args, "Snnnn", &data, &at, &count, &offset, &width))
        return NULL;
    if (offset < 0 || width < 1 || width > 8 || offset > HEAD_BYTES + MUTATION_EXTRAS - width)
        return PyErr_Format(PyExc_ValueError, "no number of %zd bytes at %zd", width, offset);
    return column(data, at, count, offset, width, number);
}
