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
#define GETK 0x0c
#define GETKQ 0x0d
#define KEY_BYTES_MAX 250
#define DIGITS_MAX 20
#define NO_INITIAL UINT32_MAX /* the expiry of a counter command that creates none */
#define QUIET_FORM 0x10       /* the bit of an opcode */
#define KEY_ENOENT 0x0001
#define NUMBER_TEXT_BYTES 24 /* more than a space and 20 digits */

enum {
    SET = 0x01, ADD, REPLACE, DELETE, INCREMENT, DECREMENT, APPEND = 0x0e, PREPEND, TOUCH = 0x1c
};

/* What follows the key of a command. */
enum { NOTHING, BLOCK, BLOCK_AND_CAS, DELTA, EXPIRY };

static const struct {
    const char *name;
    uint8_t opcode, form, extras_bytes;
} commands[] = {
    {"set ", SET, BLOCK, 8}, {"add ", ADD, BLOCK, 8}, {"replace ", REPLACE, BLOCK, 8},
    {"cas ", SET, BLOCK_AND_CAS, 8}, {"append ", APPEND, BLOCK, 0}, {"prepend ", PREPEND, BLOCK, 0},
    {"delete ", DELETE, NOTHING, 0}, {"incr ", INCREMENT, DELTA, 20},
    {"decr ", DECREMENT, DELTA, 20}, {"touch ", TOUCH, EXPIRY, 4},
};

/* A change, or a `get` with the key alone, and where it ends. */
typedef struct {
    const uint8_t *key, *value, *end;
    size_t key_bytes;
    uint64_t flags, expiry, value_bytes, cas, delta;
    uint8_t opcode, extras_bytes;
} TextCommand;

/* Reads a number up to `after`, one byte. Returns what is behind that byte; NULL: it is none. */
static const uint8_t *number_read(const uint8_t *at, const uint8_t *end, uint8_t after,
                                  uint64_t number_max, uint64_t *number)
{
    const uint8_t *begin = at;
    *number = 0;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        uint64_t digit = (uint64_t)(*at - '0');
        if (at - begin == DIGITS_MAX || *number > (number_max - digit) / 10)
            return NULL;
        *number = *number * 10 + digit;
    }
    return at == begin || at == end || *at != after ? NULL : at + 1;
}

static int text_is(const uint8_t *at, const uint8_t *end, const char *text)
{
    size_t bytes = strlen(text);
    return (size_t)(end - at) >= bytes && !memcmp(at, text, bytes);
}

/* Reads the key up to `after`. Returns what is behind that byte; NULL: it is none. */
static const uint8_t *key_read(TextCommand *command, const uint8_t *at, const uint8_t *end,
                               uint8_t after)
{
    command->key = at;
    while (at < end && *at > ' ' && at - command->key <= KEY_BYTES_MAX)
        at++;
    command->key_bytes = (size_t)(at - command->key);
    return at == end || *at != after || !command->key_bytes || command->key_bytes > KEY_BYTES_MAX
               ? NULL
               : at + 1;
}

/* Reads `noreply`; `at` NULL: what comes before it is wrong. Returns where the line feed is. */
static const uint8_t *noreply_read(TextCommand *command, const uint8_t *at, const uint8_t *end)
{
    if (at == NULL || command->opcode == TOUCH || !text_is(at, end, "noreply\r"))
        return NULL;
    command->opcode |= QUIET_FORM;
    return at + strlen("noreply\r");
}

/* Reads the last number of a line, which `noreply` may follow. Returns where the line feed is. */
static const uint8_t *last_read(TextCommand *command, const uint8_t *at, const uint8_t *end,
                                uint64_t number_max, uint64_t *number)
{
    const uint8_t *after = number_read(at, end, '\r', number_max, number);
    return after != NULL
               ? after
               : noreply_read(command, number_read(at, end, ' ', number_max, number), end);
}

/* Reads what is behind the key of a store. Returns where the line feed is. */
static const uint8_t *store_read(TextCommand *store, const uint8_t *at, const uint8_t *end,
                                 int has_cas)
{
    at = number_read(at, end, ' ', UINT32_MAX, &store->flags);
    if (at == NULL || (at = number_read(at, end, ' ', UINT32_MAX, &store->expiry)) == NULL)
        return NULL;
    if (!has_cas)
        return last_read(store, at, end, UINT32_MAX, &store->value_bytes);
    at = number_read(at, end, ' ', UINT32_MAX, &store->value_bytes);
    if (at == NULL || (at = last_read(store, at, end, UINT64_MAX, &store->cas)) == NULL)
        return NULL;
    store->cas += !store->cas; /* no document has 1; 0 would match all */
    return at;
}

/* Reads a change whose block is there. Returns 0 if it is none. */
static int change_read(TextCommand *change, const uint8_t *at, const uint8_t *end,
                       uint64_t value_bytes_max)
{
    size_t which = 0, known = sizeof commands / sizeof commands[0];
    while (which < known && !text_is(at, end, commands[which].name))
        which++;
    if (which == known)
        return 0;
    int form = commands[which].form;
    *change = (TextCommand){.opcode = commands[which].opcode,
                            .extras_bytes = commands[which].extras_bytes};
    const uint8_t *key = at + strlen(commands[which].name);
    at = key_read(change, key, end, ' ');
    if (form == NOTHING)
        at = at != NULL                           ? noreply_read(change, at, end)
             : text_is(key, end, "noreply\r\n") ? NULL /* that is no key */
                                                  : key_read(change, key, end, '\r');
    else if (at != NULL && form == DELTA)
        at = last_read(change, at, end, UINT64_MAX, &change->delta);
    else if (at != NULL && form == EXPIRY)
        at = last_read(change, at, end, UINT32_MAX, &change->expiry);
    else if (at != NULL)
        at = store_read(change, at, end, form == BLOCK_AND_CAS);
    if (at == NULL || at == end || *at++ != '\n')
        return 0;
    change->end = change->value = at;
    if (form != BLOCK && form != BLOCK_AND_CAS)
        return 1;
    change->end = at + change->value_bytes + 2;
    return change->value_bytes <= value_bytes_max &&
           (uint64_t)(end - at) >= change->value_bytes + 2 &&
           text_is(at + change->value_bytes, end, "\r\n");
}

static uint8_t *change_write(uint8_t *at, const TextCommand *change)
{
    uint8_t *extras = at + HEADER_BYTES, *key = extras + change->extras_bytes;
    memset(at, 0, HEADER_BYTES + (size_t)change->extras_bytes);
    at[0] = 0x80;
    at[1] = change->opcode;
    put_be(at + 2, change->key_bytes, 2);
    at[4] = change->extras_bytes;
    put_be(at + 8, change->extras_bytes + change->key_bytes + change->value_bytes, 4);
    put_be(at + 16, change->cas, 8);
    if (change->extras_bytes == 8) {
        put_be(extras, change->flags, 4);
        put_be(extras + 4, change->expiry, 4);
    } else if (change->extras_bytes == 20) {
        put_be(extras, change->delta, 8);
        put_be(extras + 16, NO_INITIAL, 4);
    } else if (change->extras_bytes == 4) {
        put_be(extras, change->expiry, 4);
    }
    memcpy(key, change->key, change->key_bytes);
    memcpy(key + change->key_bytes, change->value, (size_t)change->value_bytes);
    return key + change->key_bytes + change->value_bytes;
}

static int list_add(PyObject *list, Py_ssize_t number)
{
    PyObject *item = PyLong_FromSsize_t(number);
    int is_added = item != NULL && !PyList_Append(list, item);
    Py_XDECREF(item);
    return is_added;
}

/* Reads a line of `get`: each key is a GETKQ, the last one a GETK. Returns how many; 0: it is none,
   or there is no room for it. */
static size_t get_read(TextCommand *gets, size_t room, const uint8_t *at, const uint8_t *end)
{
    if (!text_is(at, end, "get "))
        return 0;
    at += 4;
    for (size_t count = 0; count < room; count++) {
        TextCommand *get = &gets[count];
        const uint8_t *after = key_read(get, at, end, ' ');
        get->opcode = after != NULL ? GETKQ : GETK;
        if (after == NULL && ((after = key_read(get, at, end, '\r')) == NULL || after == end ||
                              *after++ != '\n'))
            return 0;
        get->end = at = after;
        if (get->opcode == GETK)
            return count + 1;
    }
    return 0;
}

static uint8_t *get_write(uint8_t *at, const TextCommand *get)
{
    memset(at, 0, HEADER_BYTES);
    at[0] = 0x80;
    at[1] = get->opcode;
    put_be(at + 2, get->key_bytes, 2);
    put_be(at + 8, get->key_bytes, 4);
    memcpy(at + HEADER_BYTES, get->key, get->key_bytes);
    return at + HEADER_BYTES + get->key_bytes;
}

/* Returns the requests in `bytes`, and where each one ends in the text and there. */
static PyObject *packet_of(const TextCommand *found, size_t count, size_t bytes,
                           const uint8_t *text,
                           uint8_t *(*write)(uint8_t *, const TextCommand *))
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

PyObject *loops_text_changes(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer text;
    Py_ssize_t position;
    unsigned long long value_bytes_max;
    unsigned int count_max;
    if (!PyArg_ParseTuple(args, "y*nKI", &text, &position, &value_bytes_max, &count_max))
        return NULL;
    TextCommand changes[RUN_MAX];
    size_t count = 0, bytes = 0;
    const uint8_t *at = text_at(&text, position), *end = text_at(&text, text.len);
    for (; count < RUN_MAX && count < count_max &&
           change_read(&changes[count], at, end, value_bytes_max); count++) {
        const TextCommand *change = &changes[count];
        at = change->end;
        bytes += HEADER_BYTES + change->extras_bytes + change->key_bytes + change->value_bytes;
    }
    PyObject *packet = packet_of(changes, count, bytes, text.buf, change_write);
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
    TextCommand gets[RUN_MAX];
    size_t count = 0, bytes = 0;
    const uint8_t *at = text_at(&text, position), *end = text_at(&text, text.len);
    while (count < count_max) {
        size_t keys = get_read(&gets[count], RUN_MAX - count, at, end);
        if (!keys)
            break;
        for (; keys; keys--, count++)
            bytes += HEADER_BYTES + gets[count].key_bytes;
        at = gets[count - 1].end;
    }
    PyObject *packet = packet_of(gets, count, bytes, text.buf, get_write);
    PyBuffer_Release(&text);
    return packet;
}

/* Writes a space and a number. Returns how many bytes. */
static size_t number_write(char *to, uint64_t number)
{
    char digits[DIGITS_MAX];
    size_t count = 0;
    do
        digits[DIGITS_MAX - ++count] = (char)('0' + number % 10);
    while (number /= 10);
    *to = ' ';
    memcpy(to + 1, digits + DIGITS_MAX - count, count);
    return 1 + count;
}

/* Writes what comes before the value: all but the key has few bytes. */
static size_t head_write(char *to, const uint8_t *answer, size_t value_bytes, int shows_cas)
{
    size_t bytes = number_write(to, be32(answer + HEADER_BYTES));
    bytes += number_write(to + bytes, value_bytes);
    if (shows_cas)
        bytes += number_write(to + bytes, be64(answer + 16));
    memcpy(to + bytes, "\r\n", 2);
    return bytes + 2;
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
            size_t head_bytes = head_write(head, at, value_bytes, shows_cas);
            if (to != NULL)
                to = value_write(to, at, head, head_bytes, value_bytes);
            written += 6 + be16(at + 2) + head_bytes + value_bytes + 2;
        } else if (!are_lines || at[1] != GETK) {
            return -1;
        }
        if (are_lines && at[1] == GETK) {
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

/* Writes what became of a change. Returns how many bytes. */
static int outcome_write(char *to, const uint8_t *answer)
{
    static const char *const done[] = {
        [SET] = "STORED\r\n", [ADD] = "STORED\r\n", [REPLACE] = "STORED\r\n",
        [DELETE] = "DELETED\r\n", [APPEND] = "STORED\r\n", [PREPEND] = "STORED\r\n",
        [TOUCH] = "TOUCHED\r\n",
    };
    uint8_t opcode = answer[1];
    const char *text;
    if (opcode & QUIET_FORM && opcode != TOUCH)
        return 0;
    if (!be16(answer + 6) && (opcode == INCREMENT || opcode == DECREMENT))
        return snprintf(to, NUMBER_TEXT_BYTES, "%llu\r\n",
                        (unsigned long long)be64(answer + HEADER_BYTES));
    if (!be16(answer + 6))
        text = done[opcode];
    else if (opcode == ADD || opcode == REPLACE)
        text = "NOT_STORED\r\n";
    else
        text = be16(answer + 6) == KEY_ENOENT ? "NOT_FOUND\r\n" : "EXISTS\r\n";
    size_t bytes = strlen(text);
    memcpy(to, text, bytes);
    return (int)bytes;
}

PyObject *loops_text_outcomes(PyObject *Py_UNUSED(module), PyObject *answers)
{
    if (!PyList_CheckExact(answers)) {
        PyErr_SetString(PyExc_TypeError, "answers are a list");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(answers), bytes = 0;
    PyObject *text = PyBytes_FromStringAndSize(NULL, count * NUMBER_TEXT_BYTES);
    for (Py_ssize_t i = 0; i < count && text != NULL; i++) {
        PyObject *answer = PyList_GET_ITEM(answers, i);
        const uint8_t *at = PyBytes_CheckExact(answer) ? (const uint8_t *)PyBytes_AS_STRING(answer)
                                                       : NULL;
        Py_ssize_t has = at != NULL ? PyBytes_GET_SIZE(answer) : 0;
        int is_count = has >= HEADER_BYTES && (at[1] == INCREMENT || at[1] == DECREMENT);
        if (has < HEADER_BYTES || !at[1] || at[1] > TOUCH ||
            (at[1] > DECREMENT && at[1] < APPEND) || (at[1] > 0x1a && at[1] < TOUCH) ||
            (is_count && !be16(at + 6) && has != HEADER_BYTES + 8)) {
            PyErr_SetString(PyExc_ValueError, "these are no answers of changes");
            Py_CLEAR(text);
        } else {
            bytes += outcome_write(PyBytes_AS_STRING(text) + bytes, at);
        }
    }
    if (text != NULL)
        _PyBytes_Resize(&text, bytes);
    return text;
}
