/* What becomes of a document: whether a request is carried out, and what it stores. See
   set_parts.h. Who calls it: set_run.c. Rules: vbucket/engine/engine.py, and read_modify_write.py
   for what makes a value of the present one. */

#include "set_parts.h"

#include "blocks.h"

#define DATATYPE_PLAIN_MAX 3 /* JSON and Snappy; all above have XATTRs */
#define NO_INITIAL UINT32_MAX /* the expiry of a counter command that creates none */
#define DELTA_AT HEADER_BYTES
#define INITIAL_AT (HEADER_BYTES + 8)
#define COUNTER_EXPIRY_AT (HEADER_BYTES + 16)
#define DECREMENT 0x06
#define QUIET_FORM 0x10 /* the bit of an opcode */
#define GATQ 0x1e

static const uint8_t no_flags[4];

static int is_live(const Planned *planned)
{
    return planned->old.opcode == MUTATION;
}

int judge(Planned *planned, uint32_t now_s)
{
    const Request *request = &planned->request;
    const Old *old = &planned->old;
    int is_conditional = request_is_conditional(request);
    if (is_live(planned) && (old->datatype > DATATYPE_PLAIN_MAX ||
                             (is_conditional && old->expiry && old->expiry <= now_s)))
        return -1; /* its XATTRs stay; it expires first */
    if (!is_conditional)
        return 1;
    planned->status = 0;
    if (is_live(planned)) {
        if (request->kind == ADD || (request->cas && request->cas != old->cas))
            planned->status = KEY_EEXISTS;
    } else if (request->kind == APPEND || request->kind == PREPEND || request->at[1] == GATQ) {
        return -1; /* refused in a way of their own */
    } else if (request->cas || (request->kind != STORE && request->kind != ADD &&
                                !(request->kind == COUNT &&
                                  be32(request->at + COUNTER_EXPIRY_AT) != NO_INITIAL))) {
        planned->status = KEY_ENOENT;
    }
    if (!planned->status)
        return 1;
    return request->form & UNMARKED ? REFUSED : -1;
}

/* Reads the number of a counter. Returns 0 if it is none. */
static int number_read(const uint8_t *at, size_t bytes, uint64_t *number)
{
    *number = 0;
    for (size_t i = 0; i < bytes; i++) {
        uint8_t digit = (uint8_t)(at[i] - '0');
        if (digit > 9 || *number > (UINT64_MAX - digit) / 10)
            return 0;
        *number = *number * 10 + digit;
    }
    return bytes > 0 && bytes <= NUMBER_DIGITS;
}

/* Takes a number as the value. */
static void number_write(Content *content, uint64_t number)
{
    uint8_t *at = content->digits + NUMBER_DIGITS;
    content->number = number;
    do
        *--at = (uint8_t)('0' + number % 10);
    while (number /= 10);
    content->value = at;
    content->value_bytes = (size_t)(content->digits + NUMBER_DIGITS - at);
}

/* Counts from the number in `content` on. Returns -1 if it is none. */
static int count(const Request *request, Content *content)
{
    uint64_t number, delta = be64(request->at + DELTA_AT);
    if (!number_read(content->value, content->value_bytes, &number))
        return -1;
    if ((request->at[1] & ~QUIET_FORM) == DECREMENT)
        number_write(content, number > delta ? number - delta : 0);
    else
        number_write(content, number + delta); /* it wraps */
    return 1;
}

/* Puts the request's value behind the present one, or before it. */
static void extend(const Request *request, Content *content)
{
    content->more = request->at + request_bytes(request) - request->value_bytes;
    content->more_bytes = request->value_bytes;
    if (request->kind == APPEND)
        return;
    const uint8_t *present = content->value;
    size_t present_bytes = content->value_bytes;
    content->value = content->more;
    content->value_bytes = content->more_bytes;
    content->more = present;
    content->more_bytes = present_bytes;
}

/* Makes a value of the present one, which must be in a layer. */
static int content_of_old(SetRun *self, const Planned *planned, Content *content)
{
    const Request *request = &planned->request;
    PyObject *entry = layer_entry(self, planned);
    if (entry == NULL)
        return PyErr_Occurred() ? 0 : -1;
    Py_ssize_t before_value = ENTRY_HEAD_BYTES + (Py_ssize_t)request->key_bytes;
    if (!PyBytes_CheckExact(entry) || PyBytes_GET_SIZE(entry) < before_value ||
        planned->old.datatype & ~DATATYPE_JSON)
        return -1;
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(entry);
    content->flags = at + NUMBERS_END;
    content->value = at + before_value;
    content->value_bytes = (size_t)(PyBytes_GET_SIZE(entry) - before_value);
    content->expiry = planned->old.expiry;
    if (request->kind == COUNT)
        return count(request, content);
    if (request->kind == APPEND || request->kind == PREPEND) {
        extend(request, content);
        return 1;
    }
    content->expiry = request->expiry;
    return request->expiry == planned->old.expiry ? -1 : 1; /* that is no change */
}

int content_of(SetRun *self, const Planned *planned, Content *content)
{
    const Request *request = &planned->request;
    if (request->kind >= COUNT && is_live(planned))
        return content_of_old(self, planned, content);
    content->expiry = request->expiry;
    if (request->kind == COUNT) {
        content->flags = no_flags;
        number_write(content, be64(request->at + INITIAL_AT));
    } else if (request->kind != REMOVE) {
        content->flags = request->at + HEADER_BYTES;
        content->value = request->at + request_bytes(request) - request->value_bytes;
        content->value_bytes = request->value_bytes;
    }
    return 1;
}
