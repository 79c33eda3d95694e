/* See packets.h. Who calls it: vbucket/engine/loading/store_load.py and clients/backup.
   vbucket/native/loops.pyi has the interface.

   Nothing is believed of the frames: every byte that is read lies within the packet, and every
   field is checked as `engine.loading.bulk.Frames` checks it. A packet with anything but sound
   mutations without XATTRs is left to Python, which takes it, or says what is wrong. */

#include "packets.h"

#include "blocks.h"

#include <string.h>

#define HEADER_BYTES 24
#define EXTRAS_BYTES 31 /* of a mutation */
#define KEY_AT (HEADER_BYTES + EXTRAS_BYTES)
#define KEY_BYTES_MAX 251 /* the longest key and the default collection's id */
#define FRAMES_MAX 1024
#define REV_SEQNO_MAX (((uint64_t)1 << 48) - 1)
#define JSON 1
#define TAIL_AT 48 /* lock time, length of metadata, nru: all zero in what is stored */
#define TAIL_BYTES 7

/* Whether a frame is a sound mutation of this partition. `bytes` of it are there: its body has the
   length that the packet's table says. */
static int is_sound(const uint8_t *frame, uint32_t bytes, uint32_t vb_id, uint64_t cas_max)
{
    static const uint8_t zeros[TAIL_BYTES];
    if (bytes < KEY_AT)
        return 0;
    uint32_t key_bytes = be16(frame + 2);
    uint64_t cas = be64(frame + 16), rev_seqno = be64(frame + 32);
    return frame[0] == 0x80 && frame[1] == MUTATION && frame[4] == EXTRAS_BYTES &&
           frame[5] <= JSON && be16(frame + 6) == vb_id &&
           be32(frame + 8) == bytes - HEADER_BYTES &&
           key_bytes > 1 && key_bytes <= KEY_BYTES_MAX && KEY_AT + key_bytes <= bytes &&
           frame[KEY_AT] < 0x80 && /* a longer collection id is for Python */
           cas > 0 && cas <= cas_max && rev_seqno > 0 && rev_seqno <= REV_SEQNO_MAX &&
           memcmp(frame + TAIL_AT, zeros, TAIL_BYTES) == 0;
}

PyObject *loops_entries_of(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *packet;
    unsigned long long first_seqno, cas_max;
    unsigned int count, vb_id, epoch;
    if (!PyArg_ParseTuple(args, "SIIKIK", &packet, &count, &vb_id, &first_seqno, &epoch, &cas_max))
        return NULL;
    const uint8_t *table = (const uint8_t *)PyBytes_AS_STRING(packet);
    size_t bytes = (size_t)PyBytes_GET_SIZE(packet), table_bytes = 4 * (size_t)count;
    if (!count || count > FRAMES_MAX || bytes < table_bytes)
        Py_RETURN_NONE;
    PyObject *entries = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)(bytes - table_bytes + PREFIX_BYTES * (size_t)count));
    if (entries == NULL)
        return NULL;
    uint8_t *entry = (uint8_t *)PyBytes_AS_STRING(entries);
    size_t at = table_bytes;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t size = HEADER_BYTES + (uint64_t)be32(table + 4 * (size_t)i);
        const uint8_t *frame = table + at;
        if (size > bytes - at || !is_sound(frame, (uint32_t)size, vb_id, cas_max)) {
            Py_DECREF(entries);
            Py_RETURN_NONE;
        }
        put_be(entry, 0, 8); /* no version before */
        put_be(entry + 8, epoch, 4);
        entry += PREFIX_BYTES;
        memcpy(entry, frame, (size_t)size);
        put_be(entry + 12, 0, 4); /* opaque */
        put_be(entry + HEADER_BYTES, first_seqno + i, 8);
        entry += size;
        at += (size_t)size;
    }
    if (at != bytes) {
        Py_DECREF(entries);
        Py_RETURN_NONE;
    }
    return entries;
}

typedef struct {
    const uint8_t *data;
    size_t at, end;
} Section;

/* Reads the arguments (bytes, start, end). Returns 0 with an exception. */
static int open_section(Section *section, PyObject *args)
{
    PyObject *data;
    Py_ssize_t at, end;
    if (!PyArg_ParseTuple(args, "Snn", &data, &at, &end))
        return 0;
    if (at < 0 || end < at || end > PyBytes_GET_SIZE(data)) {
        PyErr_SetString(PyExc_ValueError, "the section is not within the data");
        return 0;
    }
    *section = (Section){(const uint8_t *)PyBytes_AS_STRING(data), (size_t)at, (size_t)end};
    return 1;
}

/* Returns the length of the frame at the beginning, 0 if it is cut short, or its extras and key are
   longer than its body. */
static size_t frame_bytes(const Section *section)
{
    const uint8_t *frame = section->data + section->at;
    size_t left = section->end - section->at;
    if (left < HEADER_BYTES)
        return 0;
    size_t body_bytes = be32(frame + 8);
    if (body_bytes > left - HEADER_BYTES || (size_t)frame[4] + be16(frame + 2) > body_bytes)
        return 0;
    return HEADER_BYTES + body_bytes;
}

/* Counts the frames. Returns -1 if one is not sound, or its key longer than a byte tells. */
static Py_ssize_t count_frames(Section section)
{
    Py_ssize_t count = 0;
    for (size_t size; section.at < section.end; section.at += size, count++) {
        size = frame_bytes(&section);
        if (!size || section.data[section.at + 2])
            return -1;
    }
    return count;
}

static int set_number(PyObject *list, Py_ssize_t index, size_t number)
{
    PyObject *item = PyLong_FromSize_t(number);
    if (item != NULL)
        PyList_SET_ITEM(list, index, item);
    return item != NULL;
}

PyObject *loops_split_frames(PyObject *Py_UNUSED(module), PyObject *args)
{
    Section section;
    if (!open_section(&section, args))
        return NULL;
    Py_ssize_t count = count_frames(section);
    if (count < 0)
        Py_RETURN_NONE;
    PyObject *starts = PyList_New(count), *ends = PyList_New(count), *bodies = PyList_New(count);
    PyObject *columns[4];
    for (int i = 0; i < 4; i++)
        columns[i] = PyBytes_FromStringAndSize(NULL, count);
    int is_done = starts && ends && bodies && columns[0] && columns[1] && columns[2] && columns[3];
    for (Py_ssize_t i = 0; is_done && i < count; i++) {
        const uint8_t *frame = section.data + section.at;
        size_t size = frame_bytes(&section);
        is_done = set_number(starts, i, section.at) && set_number(ends, i, section.at + size) &&
                  set_number(bodies, i, size - HEADER_BYTES);
        const uint8_t bytes[4] = {
            frame[1], frame[3], frame[4], frame[3] ? frame[HEADER_BYTES + frame[4]] : 0,
        };
        for (int column = 0; column < 4; column++)
            PyBytes_AS_STRING(columns[column])[i] = (char)bytes[column];
        section.at += size;
    }
    PyObject *result = NULL;
    if (is_done)
        result = PyTuple_Pack(7, starts, ends, bodies, columns[0], columns[1], columns[2],
                              columns[3]);
    Py_XDECREF(starts);
    Py_XDECREF(ends);
    Py_XDECREF(bodies);
    for (int i = 0; i < 4; i++)
        Py_XDECREF(columns[i]);
    return result;
}

PyObject *loops_frame_keys(PyObject *Py_UNUSED(module), PyObject *args)
{
    Section section;
    if (!open_section(&section, args))
        return NULL;
    Py_ssize_t count = count_frames(section);
    if (count < 0)
        Py_RETURN_NONE;
    PyObject *keys = PyList_New(count);
    for (Py_ssize_t i = 0; keys != NULL && i < count; i++) {
        const uint8_t *frame = section.data + section.at;
        PyObject *key = PyBytes_FromStringAndSize((const char *)frame + HEADER_BYTES + frame[4],
                                                  frame[3]);
        if (key == NULL)
            Py_CLEAR(keys);
        else
            PyList_SET_ITEM(keys, i, key);
        section.at += frame_bytes(&section);
    }
    return keys;
}
