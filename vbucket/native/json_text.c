/* See json_text.h. One pass, without recursion: `objects` has a bit for each open container.

   Invariant: no byte outside of [text, text + bytes) is read. */

#include "json_text.h"

#include "blocks.h"

#include <string.h>

#define JSON_LEVELS_MAX 512

#define EACH(byte) (UINT64_C(0x0101010101010101) * (byte))
#define HAS_ZERO(word) (((word) - EACH(1)) & ~(word) & EACH(0x80))

static int is_hex(const uint8_t *at, const uint8_t *end, uint32_t *code)
{
    *code = 0;
    if (end - at < 4)
        return 0;
    for (int i = 0; i < 4; i++) {
        uint8_t low = at[i] | 0x20;
        uint32_t digit = at[i] >= '0' && at[i] <= '9' ? at[i] - (uint32_t)'0'
                         : low >= 'a' && low <= 'f'   ? low - 'a' + 10u
                                                      : 16u;
        if (digit > 15)
            return 0;
        *code = *code << 4 | digit;
    }
    return 1;
}

/* Returns the bytes of the escape that begins at a backslash; 0: it is none. */
static int escape_bytes(const uint8_t *at, const uint8_t *end)
{
    uint32_t code, low;
    if (end - at < 2 || at[1] == 0)
        return 0;
    if (at[1] != 'u')
        return strchr("\"\\/bfnrt", at[1]) != NULL ? 2 : 0;
    if (!is_hex(at + 2, end, &code))
        return 0;
    if (code < 0xd800 || code > 0xdfff)
        return 6;
    if (code > 0xdbff || end - at < 12 || at[6] != '\\' || at[7] != 'u' ||
        !is_hex(at + 8, end, &low) || low < 0xdc00 || low > 0xdfff)
        return 0; /* half of a pair */
    return 12;
}

/* Returns the bytes of a character beyond ASCII; 0: it is not UTF-8. */
static int utf8_bytes(const uint8_t *at, const uint8_t *end)
{
    uint8_t first = at[0];
    int count = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
    if (!count || end - at < count)
        return 0;
    for (int i = 1; i < count; i++)
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    uint8_t second = at[1];
    int is_long = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
    int is_no_character = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
    return is_long || is_no_character ? 0 : count;
}

/* Returns the place behind the string whose first quote is before `at`; NULL: it is unsound. */
static const uint8_t *string_end(const uint8_t *at, const uint8_t *end)
{
    for (;;) {
        uint64_t word;
        while (end - at >= 8) {
            memcpy(&word, at, 8);
            if (HAS_ZERO(word ^ EACH('"')) | HAS_ZERO(word ^ EACH('\\')) |
                HAS_ZERO(word & EACH(0xe0)) | (word & EACH(0x80)))
                break;
            at += 8;
        }
        if (at == end || *at < 0x20)
            return NULL;
        if (*at == '"')
            return at + 1;
        int bytes = *at == '\\' ? escape_bytes(at, end) : *at < 0x80 ? 1 : utf8_bytes(at, end);
        if (!bytes)
            return NULL;
        at += bytes;
    }
}

static const uint8_t *digits_end(const uint8_t *at, const uint8_t *end)
{
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at;
}

/* Returns the place behind a number; NULL: it is none. */
static const uint8_t *number_end(const uint8_t *at, const uint8_t *end)
{
    const uint8_t *digits;
    at += *at == '-';
    digits = at;
    at = digits_end(at, end);
    if (at == digits || (*digits == '0' && at - digits > 1))
        return NULL;
    if (at < end && *at == '.') {
        digits = ++at;
        if ((at = digits_end(at, end)) == digits)
            return NULL;
    }
    if (at < end && (*at | 0x20) == 'e') {
        at++;
        at += at < end && (*at == '+' || *at == '-');
        digits = at;
        if ((at = digits_end(at, end)) == digits)
            return NULL;
    }
    return at;
}

/* Returns the place behind a value that is no container; NULL: it is unsound. */
static const uint8_t *scalar_end(const uint8_t *at, const uint8_t *end)
{
    static const char *const words[] = {"true", "false", "null"};
    if (*at == '"')
        return string_end(at + 1, end);
    if (*at == '-' || (*at >= '0' && *at <= '9'))
        return number_end(at, end);
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(words[i]);
        if ((size_t)(end - at) >= length && !memcmp(at, words[i], length))
            return at + length;
    }
    return NULL;
}

static const uint8_t *space_end(const uint8_t *at, const uint8_t *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

/* Returns the place of a member's value, behind its name and colon; NULL: there is none. */
static const uint8_t *member_value(const uint8_t *at, const uint8_t *end)
{
    if (at == end || *at != '"' || (at = string_end(at + 1, end)) == NULL)
        return NULL;
    at = space_end(at, end);
    return at < end && *at == ':' ? space_end(at + 1, end) : NULL;
}

int json_is_sound(const uint8_t *text, size_t bytes)
{
    const uint8_t *end = text + bytes, *at = space_end(text, end);
    uint8_t objects[JSON_LEVELS_MAX];
    size_t depth = 0;
    for (;;) {
        /* A value begins here. */
        if (at == NULL || at == end)
            return 0;
        if (*at == '{' || *at == '[') {
            int is_object = *at == '{';
            if (depth == JSON_LEVELS_MAX)
                return 0;
            objects[depth++] = (uint8_t)is_object;
            at = space_end(at + 1, end);
            if (at == end)
                return 0;
            if (*at != (is_object ? '}' : ']')) {
                if (is_object)
                    at = member_value(at, end);
                continue;
            }
        } else if ((at = scalar_end(at, end)) == NULL)
            return 0;
        /* A scalar has ended, or an empty container is about to. */
        for (;;) {
            at = space_end(at, end);
            if (!depth)
                return at == end;
            if (at == end)
                return 0;
            if (*at != (objects[depth - 1] ? '}' : ']'))
                break;
            depth--;
            at++;
        }
        if (*at != ',')
            return 0;
        at = space_end(at + 1, end);
        if (objects[depth - 1])
            at = member_value(at, end);
    }
}

PyObject *py_is_json(PyObject *Py_UNUSED(module), PyObject *text)
{
    Py_buffer view;
    if (PyObject_GetBuffer(text, &view, PyBUF_SIMPLE))
        return NULL;
    int is_sound = json_is_sound(view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyBool_FromLong(is_sound);
}

#define FRAME_HEADER_BYTES 24
#define OPCODE_IN_FRAME 1
#define DATATYPE_IN_FRAME 5
#define DATATYPE_JSON 1
#define DATATYPE_XATTR 4
#define MUTATION_EXTRAS_BYTES 31

/* Sets or clears the JSON bit of the mutation in [frame, frame + bytes) by its value. What is
   malformed stays as it is. */
static void mark_frame(uint8_t *frame, size_t bytes)
{
    size_t at = FRAME_HEADER_BYTES + MUTATION_EXTRAS_BYTES + be16(frame + 2);
    if (frame[OPCODE_IN_FRAME] != MUTATION || frame[4] != MUTATION_EXTRAS_BYTES || at > bytes)
        return;
    if (frame[DATATYPE_IN_FRAME] & DATATYPE_XATTR) {
        if (bytes - at < 4 || be32(frame + at) > bytes - at - 4)
            return;
        at += 4 + be32(frame + at);
    }
    if (json_is_sound(frame + at, bytes - at))
        frame[DATATYPE_IN_FRAME] |= DATATYPE_JSON;
    else
        frame[DATATYPE_IN_FRAME] &= (uint8_t)~DATATYPE_JSON;
}

PyObject *py_mark_json(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *packet;
    Py_ssize_t bytes, count;
    if (!PyArg_ParseTuple(args, "y#n", &packet, &bytes, &count))
        return NULL;
    PyObject *marked = PyBytes_FromStringAndSize(packet, bytes);
    if (marked == NULL || count <= 0 || count > bytes / 4)
        return marked;
    uint8_t *data = (uint8_t *)PyBytes_AS_STRING(marked);
    Py_ssize_t at = 4 * count;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t frame_bytes = FRAME_HEADER_BYTES + (Py_ssize_t)be32(data + 4 * i);
        if (frame_bytes > bytes - at)
            break;
        mark_frame(data + at, (size_t)frame_bytes);
        at += frame_bytes;
    }
    return marked;
}
