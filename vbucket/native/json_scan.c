/* See json_scan.h.

   Each open container has a level, with the paths that lead into it as bits of a mask. A value
   that some of them name is noted when it ends. An element that may be the last one of its array
   is noted at the end of the array, so that no element costs more because of index -1.

   A step stops between two bytes that it understands by themselves: the text is all there, so an
   escape or a character of several bytes may reach beyond the step. */

#include "json_scan.h"

#include "json_string.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PATHS_MAX 16
#define STEPS_MAX 32
#define LEVELS_MAX 1024
#define TRACKED (STEPS_MAX + 2) /* the document itself, and a container for each step and below */
#define NO_INDEX INT64_MAX
#define LAST_INDEX (-1)
#define KEY_BYTES_MAX 1024
#define ESCAPED_BYTES_MAX 6 /* bytes of "\u0041", the longest text for one byte of a name */

enum { GOES_ON, IS_DONE, IS_UNSOUND, IS_TOO_DEEP };
enum { FIRST_VALUE, VALUE, FIRST_NAME, NAME, IN_NAME, COLON, IN_STRING, IN_NUMBER, AFTER };

typedef struct {
    PyObject *key; /* NULL: an index */
    int64_t index;
} Step;

typedef struct {
    Py_ssize_t at, end, name_at, count;
    int has_containers, has_wanted;
} Place;

typedef struct {
    Step *steps;
    Place *places; /* of the document, and behind each step */
    PyObject *wanted;
    int length, deepest;
} Path;

typedef struct {
    Py_ssize_t count, child_at, child_name_at;
    int64_t next_index;
    uint32_t names, indexes, lasts, wanting, child, wanted_found;
    uint32_t last_wanted;
    int is_array, has_containers;
    Place last; /* not set before there is an element */
} Level;

typedef struct {
    PyObject_HEAD
    Py_buffer text;
    Path paths[PATHS_MAX];
    int path_count, levels_max, checks_utf8;
    Py_ssize_t at, piece_at;
    int state, result, number, has_escape;
    int depth, deepest;
    uint32_t touched;
    uint8_t is_object[LEVELS_MAX + 1];
    Level levels[TRACKED];
    Level untracked;
} JsonScan;

/* -- numbers: a table, state by kind of byte ------------------------------------------------- */

enum { N_START, N_MINUS, N_ZERO, N_DIGITS, N_DOT, N_PART, N_E, N_SIGN, N_EXPONENT, N_END };

/* 0: zero, 1: another digit, 2: minus, 3: plus, 4: point, 5: e, 6: anything else */
static uint8_t number_kinds[256];

void json_scan_init(void)
{
    memset(number_kinds, 6, sizeof number_kinds);
    memset(number_kinds + '1', 1, 9);
    number_kinds['0'] = 0;
    number_kinds['-'] = 2;
    number_kinds['+'] = 3;
    number_kinds['.'] = 4;
    number_kinds['e'] = number_kinds['E'] = 5;
}

static const uint8_t number_next[N_END][7] = {
    /*              0           1           -        +       .      e    other */
    [N_START] = {N_ZERO, N_DIGITS, N_MINUS, N_END, N_END, N_END, N_END},
    [N_MINUS] = {N_ZERO, N_DIGITS, N_END, N_END, N_END, N_END, N_END},
    [N_ZERO] = {N_END, N_END, N_END, N_END, N_DOT, N_E, N_END},
    [N_DIGITS] = {N_DIGITS, N_DIGITS, N_END, N_END, N_DOT, N_E, N_END},
    [N_DOT] = {N_PART, N_PART, N_END, N_END, N_END, N_END, N_END},
    [N_PART] = {N_PART, N_PART, N_END, N_END, N_END, N_E, N_END},
    [N_E] = {N_EXPONENT, N_EXPONENT, N_SIGN, N_SIGN, N_END, N_END, N_END},
    [N_SIGN] = {N_EXPONENT, N_EXPONENT, N_END, N_END, N_END, N_END, N_END},
    [N_EXPONENT] = {N_EXPONENT, N_EXPONENT, N_END, N_END, N_END, N_END, N_END},
};

static int is_number(int state)
{
    return state == N_ZERO || state == N_DIGITS || state == N_PART || state == N_EXPONENT;
}

/* -- levels ---------------------------------------------------------------------------------- */

#define FOR_EACH(i, mask) \
    for (uint32_t left_ = (mask), i = 0; left_ && (i = (uint32_t)__builtin_ctz(left_), 1); \
         left_ &= left_ - 1)

static inline Level *level_at(JsonScan *scan, int depth)
{
    return depth < TRACKED ? &scan->levels[depth] : &scan->untracked;
}

/* Forget what was found of these paths: a later member or element counts instead. */
static void forget(JsonScan *scan, uint32_t mask)
{
    FOR_EACH(i, mask) {
        Path *path = &scan->paths[i];
        for (int k = 0; k <= path->deepest; k++)
            path->places[k].at = -1;
        path->deepest = -1;
    }
    scan->touched &= ~mask;
}

static void note(JsonScan *scan, uint32_t mask, int length, const Place *place, uint32_t wanted)
{
    FOR_EACH(i, mask) {
        Path *path = &scan->paths[i];
        path->places[length] = *place;
        path->places[length].has_wanted = (int)(wanted >> i & 1);
        if (path->deepest < length)
            path->deepest = length;
    }
    scan->touched |= mask;
}

static void seek_index(JsonScan *scan, Level *level, int length)
{
    level->next_index = NO_INDEX;
    FOR_EACH(i, level->indexes) {
        int64_t index = scan->paths[i].steps[length].index;
        if (index >= level->count && index < level->next_index)
            level->next_index = index;
    }
}

static void match_index(JsonScan *scan, Level *level)
{
    int length = scan->depth - 1;
    FOR_EACH(i, level->indexes)
        if (scan->paths[i].steps[length].index == level->count)
            level->child |= 1u << i;
    level->count++;
    seek_index(scan, level, length);
    level->count--;
}

static inline void begin_value(JsonScan *scan, Level *level, Py_ssize_t at)
{
    level->child_at = at;
    if (level->is_array) {
        level->child = 0;
        if (level->count == level->next_index)
            match_index(scan, level);
    }
    uint32_t again = (level->child | level->lasts) & scan->touched;
    if (again)
        forget(scan, again);
}

static inline void end_value(JsonScan *scan, Level *level, Py_ssize_t end, const Level *inner)
{
    level->count++;
    if (!(level->child | level->lasts))
        return;
    Place place = {level->child_at, end, level->child_name_at, inner ? inner->count : 0,
                   inner ? inner->has_containers : 0, 0};
    uint32_t wanted = inner ? inner->wanted_found : 0;
    if (level->child)
        note(scan, level->child, scan->depth, &place, wanted);
    if (level->lasts) {
        level->last = place;
        level->last_wanted = wanted;
    }
}

/* A value that is no container has ended. */
static inline void end_plain(JsonScan *scan, Py_ssize_t end)
{
    Level *level = level_at(scan, scan->depth);
    if (level->wanting) {
        const char *text = (const char *)scan->text.buf + level->child_at;
        Py_ssize_t size = end - level->child_at;
        FOR_EACH(i, level->wanting) {
            PyObject *wanted = scan->paths[i].wanted;
            if (PyBytes_GET_SIZE(wanted) == size &&
                !memcmp(PyBytes_AS_STRING(wanted), text, (size_t)size))
                level->wanted_found |= 1u << i;
        }
    }
    end_value(scan, level, end, NULL);
}

static int open_container(JsonScan *scan, int is_object)
{
    if (scan->depth == scan->levels_max)
        return 0;
    Level *outer = level_at(scan, scan->depth);
    outer->has_containers = 1;
    uint32_t mask = outer->child | outer->lasts;
    scan->depth++;
    if (scan->depth > scan->deepest)
        scan->deepest = scan->depth;
    scan->is_object[scan->depth] = (uint8_t)is_object;
    if (scan->depth >= TRACKED)
        return 1; /* no path is so long, so the masks of this level stay empty */
    Level *level = &scan->levels[scan->depth];
    memset(level, 0, offsetof(Level, last));
    level->child_name_at = -1;
    level->next_index = NO_INDEX;
    level->is_array = !is_object;
    if (!mask)
        return 1;
    int length = scan->depth - 1;
    FOR_EACH(i, mask) {
        const Path *path = &scan->paths[i];
        if (path->length == length)
            level->wanting |= !is_object && path->wanted != NULL ? 1u << i : 0;
        else if ((path->steps[length].key != NULL) != is_object)
            continue;
        else if (is_object)
            level->names |= 1u << i;
        else if (path->steps[length].index == LAST_INDEX)
            level->lasts |= 1u << i;
        else
            level->indexes |= 1u << i;
    }
    seek_index(scan, level, length);
    return 1;
}

static void close_container(JsonScan *scan, Py_ssize_t end)
{
    Level *level = level_at(scan, scan->depth);
    if (level->lasts && level->count)
        note(scan, level->lasts, scan->depth, &level->last, level->last_wanted);
    scan->depth--;
    end_value(scan, level_at(scan, scan->depth), end, level);
}

/* Find the paths that a member's name leads on. */
static void match_name(JsonScan *scan, Level *level, const uint8_t *name, Py_ssize_t size)
{
    uint8_t plain[KEY_BYTES_MAX * ESCAPED_BYTES_MAX];
    level->child = 0;
    if (!level->names)
        return;
    if (scan->has_escape) {
        if (size > (Py_ssize_t)sizeof plain)
            return;
        size = unescape(name, name + size, plain);
        name = plain;
    }
    FOR_EACH(i, level->names) {
        PyObject *key = scan->paths[i].steps[scan->depth - 1].key;
        if (PyBytes_GET_SIZE(key) == size && !memcmp(PyBytes_AS_STRING(key), name, (size_t)size))
            level->child |= 1u << i;
    }
}

/* -- the pass -------------------------------------------------------------------------------- */

static inline int is_white(uint8_t byte)
{
    return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t';
}

static int literal_bytes(const uint8_t *at, const uint8_t *end)
{
    if (end - at >= 4 && (!memcmp(at, "true", 4) || !memcmp(at, "null", 4)))
        return 4;
    return end - at >= 5 && !memcmp(at, "false", 5) ? 5 : 0;
}

typedef struct {
    const uint8_t *text, *stop, *end;
} Span;

/* Each of these goes on at a place, sets the state, and returns the next place. NULL: the text ends
   here, and `result` says how. */

static inline const uint8_t *unsound(JsonScan *scan)
{
    scan->result = IS_UNSOUND;
    return NULL;
}

static inline const uint8_t *on_number(JsonScan *scan, const Span *span, const uint8_t *at)
{
    int number = scan->number, next = number;
    while (at < span->stop && (next = number_next[number][number_kinds[*at]]) != N_END) {
        number = next;
        at++;
    }
    scan->number = number;
    scan->state = IN_NUMBER;
    if (next != N_END && at != span->end)
        return at;
    if (!is_number(number))
        return unsound(scan);
    end_plain(scan, at - span->text);
    scan->state = AFTER;
    if (at < span->stop && *at == ',' && scan->depth && !scan->is_object[scan->depth]) {
        scan->state = VALUE; /* the usual way on in an array */
        at++;
    }
    return at;
}

static inline const uint8_t *on_value(JsonScan *scan, const Span *span, const uint8_t *at)
{
    uint8_t byte = *at;
    begin_value(scan, level_at(scan, scan->depth), at - span->text);
    if (byte == '[' || byte == '{') {
        if (!open_container(scan, byte == '{')) {
            scan->result = IS_TOO_DEEP;
            return NULL;
        }
        scan->state = byte == '{' ? FIRST_NAME : FIRST_VALUE;
        return at + 1;
    }
    if (byte == '"') {
        scan->state = IN_STRING;
        return at + 1;
    }
    if (number_kinds[byte] <= 2) {
        scan->number = number_next[N_START][number_kinds[byte]];
        return on_number(scan, span, at + 1);
    }
    int bytes = literal_bytes(at, span->end);
    if (!bytes)
        return unsound(scan);
    end_plain(scan, at + bytes - span->text);
    scan->state = AFTER;
    return at + bytes;
}

static inline const uint8_t *on_string(JsonScan *scan, const Span *span, const uint8_t *at)
{
    int is_closed = 0;
    at = string_end(at, span->stop, span->end, scan->checks_utf8, &scan->has_escape, &is_closed);
    if (at == NULL)
        return unsound(scan);
    if (is_closed && scan->state == IN_STRING) {
        end_plain(scan, at - span->text);
        scan->state = AFTER;
    } else if (is_closed) {
        const uint8_t *name = span->text + scan->piece_at + 1;
        Level *level = level_at(scan, scan->depth);
        level->child_name_at = scan->piece_at;
        match_name(scan, level, name, at - 1 - name);
        scan->state = COLON;
    }
    return at;
}

static inline const uint8_t *on_mark(JsonScan *scan, const Span *span, const uint8_t *at)
{
    int state = scan->state, is_object = scan->is_object[scan->depth];
    uint8_t byte = *at;
    int may_close = state != NAME && state != COLON && scan->depth;
    if (may_close && byte == (is_object ? '}' : ']')) {
        close_container(scan, at + 1 - span->text);
        scan->state = AFTER;
    } else if (state == COLON && byte == ':')
        scan->state = VALUE;
    else if (state == AFTER && byte == ',' && scan->depth)
        scan->state = is_object ? NAME : VALUE;
    else if ((state == NAME || state == FIRST_NAME) && byte == '"') {
        scan->has_escape = 0;
        scan->piece_at = at - span->text;
        scan->state = IN_NAME;
    } else
        return unsound(scan);
    return at + 1;
}

static int scan_on(JsonScan *scan, Py_ssize_t bytes_max)
{
    const uint8_t *text = scan->text.buf, *end = text + scan->text.len, *at = text + scan->at;
    Span span = {text, end - at > bytes_max ? at + bytes_max : end, end};
    while (at != NULL) {
        int state = scan->state;
        if (state != IN_STRING && state != IN_NAME && state != IN_NUMBER) {
            while (at < span.stop && is_white(*at))
                at++;
        }
        if (at >= span.stop)
            break;
        if (state == VALUE || (state == FIRST_VALUE && *at != ']'))
            at = on_value(scan, &span, at);
        else if (state == IN_STRING || state == IN_NAME)
            at = on_string(scan, &span, at);
        else if (state == IN_NUMBER)
            at = on_number(scan, &span, at);
        else
            at = on_mark(scan, &span, at);
    }
    if (at == NULL)
        return scan->result;
    scan->at = at - text;
    if (at < end)
        return GOES_ON;
    return scan->state == AFTER && !scan->depth ? IS_DONE : IS_UNSOUND;
}

/* -- the type -------------------------------------------------------------------------------- */

static int take_path(Path *path, PyObject *steps, PyObject *wanted)
{
    if (!PyTuple_Check(steps) || PyTuple_GET_SIZE(steps) > STEPS_MAX ||
        (wanted != Py_None && !PyBytes_Check(wanted))) {
        PyErr_SetString(PyExc_ValueError, "a path is a tuple of at most 32 steps");
        return 0;
    }
    path->length = (int)PyTuple_GET_SIZE(steps);
    path->deepest = -1;
    path->wanted = wanted == Py_None ? NULL : Py_NewRef(wanted);
    path->steps = PyMem_Calloc((size_t)path->length + 1, sizeof(Step));
    path->places = PyMem_Calloc((size_t)path->length + 1, sizeof(Place));
    if (path->steps == NULL || path->places == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (int k = 0; k <= path->length; k++)
        path->places[k].at = -1;
    for (int k = 0; k < path->length; k++) {
        PyObject *step = PyTuple_GET_ITEM(steps, k);
        if (PyBytes_Check(step)) {
            path->steps[k].key = Py_NewRef(step);
            continue;
        }
        path->steps[k].index = PyLong_AsLongLong(step);
        if (path->steps[k].index == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static PyObject *json_scan_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *text, *paths, *wanted;
    int levels_max, checks_utf8;
    if (!PyArg_ParseTuple(args, "OO!O!ip", &text, &PyTuple_Type, &paths, &PyTuple_Type, &wanted,
                          &levels_max, &checks_utf8))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(paths);
    if (count > PATHS_MAX || PyTuple_GET_SIZE(wanted) != count || levels_max < 0 ||
        levels_max > LEVELS_MAX) {
        PyErr_SetString(PyExc_ValueError, "at most 16 paths and 1024 levels");
        return NULL;
    }
    JsonScan *scan = (JsonScan *)type->tp_alloc(type, 0);
    if (scan == NULL)
        return NULL;
    scan->levels_max = levels_max;
    scan->checks_utf8 = checks_utf8;
    scan->state = VALUE;
    scan->untracked.next_index = NO_INDEX;
    scan->levels[0].next_index = NO_INDEX;
    scan->levels[0].child_name_at = -1;
    scan->levels[0].child = count ? (uint32_t)((UINT64_C(1) << count) - 1) : 0;
    if (PyObject_GetBuffer(text, &scan->text, PyBUF_SIMPLE) < 0) {
        Py_DECREF(scan);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        scan->path_count = (int)i + 1;
        if (!take_path(&scan->paths[i], PyTuple_GET_ITEM(paths, i), PyTuple_GET_ITEM(wanted, i))) {
            Py_DECREF(scan);
            return NULL;
        }
    }
    return (PyObject *)scan;
}

static void json_scan_dealloc(JsonScan *scan)
{
    PyTypeObject *type = Py_TYPE(scan);
    for (int i = 0; i < scan->path_count; i++) {
        Path *path = &scan->paths[i];
        for (int k = 0; path->steps != NULL && k < path->length; k++)
            Py_XDECREF(path->steps[k].key);
        PyMem_Free(path->steps);
        PyMem_Free(path->places);
        Py_XDECREF(path->wanted);
    }
    if (scan->text.obj != NULL)
        PyBuffer_Release(&scan->text);
    type->tp_free((PyObject *)scan);
    Py_DECREF(type);
}

static PyObject *json_scan_step(JsonScan *scan, PyObject *arg)
{
    Py_ssize_t bytes_max = PyLong_AsSsize_t(arg);
    if (bytes_max == -1 && PyErr_Occurred())
        return NULL;
    if (scan->result == GOES_ON)
        scan->result = scan_on(scan, bytes_max > 0 ? bytes_max : 1);
    return PyLong_FromLong(scan->result);
}

static PyObject *json_scan_places(JsonScan *scan, PyObject *arg)
{
    long i = PyLong_AsLong(arg);
    if (i < 0 || i >= scan->path_count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "there is no such path");
        return NULL;
    }
    const Path *path = &scan->paths[i];
    PyObject *found = PyList_New(0);
    for (int k = 0; found != NULL && k <= path->length; k++) {
        const Place *place = &path->places[k];
        if (place->at < 0)
            break;
        PyObject *one = Py_BuildValue("(nnnnii)", place->at, place->end, place->name_at,
                                      place->count, place->has_containers, place->has_wanted);
        if (one == NULL || PyList_Append(found, one) < 0)
            Py_CLEAR(found);
        Py_XDECREF(one);
    }
    return found;
}

static PyObject *json_scan_depth(JsonScan *scan, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(scan->deepest);
}

static PyMethodDef methods[] = {
    {"step", (PyCFunction)json_scan_step, METH_O, NULL},
    {"places", (PyCFunction)json_scan_places, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"depth", (getter)json_scan_depth, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, json_scan_new},
    {Py_tp_dealloc, json_scan_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {0, NULL},
};

PyType_Spec json_scan_spec = {
    .name = "vbucket.native.loops.JsonScan",
    .basicsize = sizeof(JsonScan),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
