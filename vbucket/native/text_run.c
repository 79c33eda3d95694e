/* See text_run.h. vbucket/native/loops.pyi has the interface. dcp/session/text.py calls it, and has
   the rules.

   Invariants
   - no byte outside of the given ones is read;
   - what is not written as every client writes it ends the run before it: other spaces, a sign, a
     number that is too large, a line end without \r, bytes that are missing. */

#include "text_run.h"

#include "blocks.h"

#include <stdio.h>
#include <string.h>

#define RUN_MAX 256
#define HEADER_BYTES 24
#define REQUEST_HEAD_BYTES 32
#define SET 0x01
#define SETQ 0x11
#define GETK 0x0c
#define KEY_BYTES_MAX 250
#define DIGITS_MAX 10
#define NUMBER_TEXT_BYTES 24 /* more than a space and 20 digits */

/* A `set`, or a `get` with the key alone, and where it ends. */
typedef struct {
    const uint8_t *key, *value, *end;
    size_t key_bytes;
    uint64_t flags, expiry, value_bytes;
    int is_quiet;
} TextSet;

/* Reads a number up to `after`, one byte. Returns what is behind that byte; NULL: it is none. */
static const uint8_t *number_read(const uint8_t *at, const uint8_t *end, uint8_t after,
                                  uint64_t *number)
{
    const uint8_t *begin = at;
    *number = 0;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        if (at - begin == DIGITS_MAX)
            return NULL;
        *number = *number * 10 + (uint64_t)(*at - '0');
    }
    return at == begin || at == end || *at != after || *number > UINT32_MAX ? NULL : at + 1;
}

static int text_is(const uint8_t *at, const uint8_t *end, const char *text)
{
    size_t bytes = strlen(text);
    return (size_t)(end - at) >= bytes && !memcmp(at, text, bytes);
}

/* Reads a `set` whose block is there. Returns 0 if it is none. */
static int set_read(TextSet *set, const uint8_t *at, const uint8_t *end, uint64_t value_bytes_max)
{
    if (!text_is(at, end, "set "))
        return 0;
    set->key = at += 4;
    while (at < end && *at > ' ' && at - set->key <= KEY_BYTES_MAX)
        at++;
    set->key_bytes = (size_t)(at - set->key);
    if (at == end || *at != ' ' || !set->key_bytes || set->key_bytes > KEY_BYTES_MAX)
        return 0;
    at = number_read(at + 1, end, ' ', &set->flags);
    if (at == NULL || (at = number_read(at, end, ' ', &set->expiry)) == NULL)
        return 0;
    const uint8_t *bytes_at = at;
    at = number_read(bytes_at, end, '\r', &set->value_bytes);
    set->is_quiet = at == NULL;
    if (set->is_quiet) {
        at = number_read(bytes_at, end, ' ', &set->value_bytes);
        if (at == NULL || !text_is(at, end, "noreply\r"))
            return 0;
        at += strlen("noreply\r");
    }
    if (at == end || *at++ != '\n' || set->value_bytes > value_bytes_max ||
        (uint64_t)(end - at) < set->value_bytes + 2 || !text_is(at + set->value_bytes, end, "\r\n"))
        return 0;
    set->value = at;
    set->end = at + set->value_bytes + 2;
    return 1;
}

static uint8_t *set_write(uint8_t *at, const TextSet *set)
{
    memset(at, 0, REQUEST_HEAD_BYTES);
    at[0] = 0x80;
    at[1] = set->is_quiet ? SETQ : SET;
    put_be(at + 2, set->key_bytes, 2);
    at[4] = 8;
    put_be(at + 8, 8 + set->key_bytes + set->value_bytes, 4);
    put_be(at + HEADER_BYTES, set->flags, 4);
    put_be(at + HEADER_BYTES + 4, set->expiry, 4);
    memcpy(at + REQUEST_HEAD_BYTES, set->key, set->key_bytes);
    memcpy(at + REQUEST_HEAD_BYTES + set->key_bytes, set->value, (size_t)set->value_bytes);
    return at + REQUEST_HEAD_BYTES + set->key_bytes + set->value_bytes;
}

static int list_add(PyObject *list, Py_ssize_t number)
{
    PyObject *item = PyLong_FromSsize_t(number);
    int is_added = item != NULL && !PyList_Append(list, item);
    Py_XDECREF(item);
    return is_added;
}

/* Reads `get` and one key. Returns 0 if it is none. */
static int get_read(TextSet *get, const uint8_t *at, const uint8_t *end)
{
    if (!text_is(at, end, "get "))
        return 0;
    get->key = at += 4;
    while (at < end && *at > ' ' && at - get->key <= KEY_BYTES_MAX)
        at++;
    get->key_bytes = (size_t)(at - get->key);
    get->end = at + 2;
    return get->key_bytes && get->key_bytes <= KEY_BYTES_MAX && text_is(at, end, "\r\n");
}

static uint8_t *get_write(uint8_t *at, const TextSet *get)
{
    memset(at, 0, HEADER_BYTES);
    at[0] = 0x80;
    at[1] = GETK;
    put_be(at + 2, get->key_bytes, 2);
    put_be(at + 8, get->key_bytes, 4);
    memcpy(at + HEADER_BYTES, get->key, get->key_bytes);
    return at + HEADER_BYTES + get->key_bytes;
}

/* Returns the requests in `bytes`, and where each one ends in the text and there. */
static PyObject *packet_of(const TextSet *found, size_t count, size_t bytes, const uint8_t *text,
                           uint8_t *(*write)(uint8_t *, const TextSet *))
{
    PyObject *packet = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes), *result = NULL;
    PyObject *text_ends = PyList_New(0), *packet_ends = PyList_New(0);
    if (packet != NULL && text_ends != NULL && packet_ends != NULL) {
        uint8_t *first = (uint8_t *)PyBytes_AS_STRING(packet), *to = first;
        size_t i = 0;
        for (; i < count; i++) {
            to = write(to, &found[i]);
            if (!list_add(text_ends, found[i].end - text) || !list_add(packet_ends, to - first))
                break;
        }
        if (i == count)
            result = PyTuple_Pack(3, packet, text_ends, packet_ends);
    }
    Py_XDECREF(packet);
    Py_XDECREF(text_ends);
    Py_XDECREF(packet_ends);
    return result;
}

static const uint8_t *text_at(const Py_buffer *text, Py_ssize_t position)
{
    const uint8_t *begin = text->buf;
    return begin + (position < 0 || position > text->len ? text->len : position);
}

PyObject *loops_text_sets(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer text;
    Py_ssize_t position;
    unsigned long long value_bytes_max;
    unsigned int count_max;
    if (!PyArg_ParseTuple(args, "y*nKI", &text, &position, &value_bytes_max, &count_max))
        return NULL;
    TextSet sets[RUN_MAX];
    size_t count = 0, bytes = 0;
    const uint8_t *at = text_at(&text, position), *end = text_at(&text, text.len);
    for (; count < RUN_MAX && count < count_max &&
           set_read(&sets[count], at, end, value_bytes_max); count++) {
        at = sets[count].end;
        bytes += REQUEST_HEAD_BYTES + sets[count].key_bytes + sets[count].value_bytes;
    }
    PyObject *packet = packet_of(sets, count, bytes, text.buf, set_write);
    PyBuffer_Release(&text);
    return packet;
}

PyObject *loops_text_gets(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer text;
    Py_ssize_t position;
    unsigned int count_max;
    if (!PyArg_ParseTuple(args, "y*nI", &text, &position, &count_max))
        return NULL;
    TextSet gets[RUN_MAX];
    size_t count = 0, bytes = 0;
    const uint8_t *at = text_at(&text, position), *end = text_at(&text, text.len);
    for (; count < RUN_MAX && count < count_max && get_read(&gets[count], at, end); count++) {
        at = gets[count].end;
        bytes += HEADER_BYTES + gets[count].key_bytes;
    }
    PyObject *packet = packet_of(gets, count, bytes, text.buf, get_write);
    PyBuffer_Release(&text);
    return packet;
}

/* Writes what comes before the value: all but the key has few bytes. */
static int head_write(char *to, const uint8_t *answer, size_t value_bytes, int shows_cas)
{
    uint32_t flags = be32(answer + HEADER_BYTES);
    if (shows_cas)
        return snprintf(to, 3 * NUMBER_TEXT_BYTES, " %lu %zu %llu\r\n", (unsigned long)flags,
                        value_bytes, (unsigned long long)be64(answer + 16));
    return snprintf(to, 3 * NUMBER_TEXT_BYTES, " %lu %zu\r\n", (unsigned long)flags, value_bytes);
}

/* Writes a document. Returns what is behind it. */
static char *value_write(char *to, const uint8_t *answer, const char *head, size_t head_bytes,
                         size_t value_bytes)
{
    size_t key_bytes = be16(answer + 2);
    const uint8_t *key = answer + HEADER_BYTES + 4;
    memcpy(to, "VALUE ", 6);
    memcpy(to + 6, key, key_bytes);
    to += 6 + key_bytes;
    memcpy(to, head, head_bytes);
    memcpy(to + head_bytes, key + key_bytes, value_bytes);
    to += head_bytes + value_bytes;
    memcpy(to, "\r\n", 2);
    return to + 2;
}

/* Writes the answers as text. `to` NULL: only counts. Returns how many bytes; -1: not sound. */
static Py_ssize_t values_write(char *to, const uint8_t *at, size_t bytes, int shows_cas,
                               int are_lines)
{
    size_t written = 0, answer_bytes;
    for (; bytes; at += answer_bytes, bytes -= answer_bytes) {
        if (bytes < HEADER_BYTES || be32(at + 8) > bytes - HEADER_BYTES)
            return -1;
        answer_bytes = HEADER_BYTES + (size_t)be32(at + 8);
        if (!be16(at + 6)) {
            if (at[4] != 4 || answer_bytes < HEADER_BYTES + 4 + be16(at + 2))
                return -1;
            size_t value_bytes = answer_bytes - HEADER_BYTES - 4 - be16(at + 2);
            char head[3 * NUMBER_TEXT_BYTES];
            size_t head_bytes = (size_t)head_write(head, at, value_bytes, shows_cas);
            if (to != NULL)
                to = value_write(to, at, head, head_bytes, value_bytes);
            written += 6 + be16(at + 2) + head_bytes + value_bytes + 2;
        } else if (!are_lines) {
            return -1;
        }
        if (are_lines) {
            if (to != NULL) {
                memcpy(to, "END\r\n", 5);
                to += 5;
            }
            written += 5;
        }
    }
    return (Py_ssize_t)written;
}

PyObject *loops_text_values(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer answers;
    int shows_cas, are_lines;
    if (!PyArg_ParseTuple(args, "y*pp", &answers, &shows_cas, &are_lines))
        return NULL;
    const uint8_t *at = answers.buf;
    size_t answers_bytes = (size_t)answers.len;
    Py_ssize_t bytes = values_write(NULL, at, answers_bytes, shows_cas, are_lines);
    PyObject *text = NULL;
    if (bytes < 0)
        PyErr_SetString(PyExc_ValueError, "these are no answers of GETs with their keys");
    else
        text = PyBytes_FromStringAndSize(NULL, bytes);
    if (text != NULL)
        values_write(PyBytes_AS_STRING(text), at, answers_bytes, shows_cas, are_lines);
    PyBuffer_Release(&answers);
    return text;
}
