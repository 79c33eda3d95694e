/* See json_string.h. */

#include "json_string.h"

#include <string.h>

static int hex_of(const uint8_t *at, const uint8_t *end, uint32_t *code)
{
    if (end - at < 4)
        return 0;
    *code = 0;
    for (int i = 0; i < 4; i++) {
        uint8_t byte = at[i], low = byte | 0x20;
        uint32_t digit = byte >= '0' && byte <= '9' ? byte - (uint32_t)'0'
                         : low >= 'a' && low <= 'f' ? low - 'a' + 10u
                                                    : 16u;
        if (digit > 15)
            return 0;
        *code = *code << 4 | digit;
    }
    return 1;
}

/* Return the bytes of an escape, which begins with a backslash; 0: it is none. */
static int escape_bytes(const uint8_t *at, const uint8_t *end, uint32_t *code)
{
    if (end - at < 2)
        return 0;
    switch (at[1]) {
    case '"': case '\\': case '/': *code = at[1]; return 2;
    case 'b': *code = '\b'; return 2;
    case 'f': *code = '\f'; return 2;
    case 'n': *code = '\n'; return 2;
    case 'r': *code = '\r'; return 2;
    case 't': *code = '\t'; return 2;
    case 'u': break;
    default: return 0;
    }
    if (!hex_of(at + 2, end, code) || (*code >= 0xdc00 && *code < 0xe000))
        return 0;
    if (*code < 0xd800 || *code >= 0xe000)
        return 6;
    uint32_t low;
    if (end - at < 12 || at[6] != '\\' || at[7] != 'u' || !hex_of(at + 8, end, &low) ||
        low < 0xdc00 || low >= 0xe000)
        return 0;
    *code = 0x10000 + ((*code - 0xd800) << 10) + (low - 0xdc00);
    return 12;
}

/* Return the bytes of a character that is not ASCII; 0: it is not UTF-8. */
static int utf8_bytes(const uint8_t *at, const uint8_t *end)
{
    uint8_t first = at[0];
    int count = first >= 0xc2 && first < 0xe0 ? 2 : first >= 0xe0 && first < 0xf0 ? 3
              : first >= 0xf0 && first < 0xf5 ? 4 : 0;
    if (!count || end - at < count)
        return 0;
    for (int i = 1; i < count; i++)
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    uint8_t second = at[1];
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
        (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
        return 0;
    return count;
}

#define EACH(byte) (UINT64_C(0x0101010101010101) * (byte))
#define HAS_ZERO(word) (((word) - EACH(1)) & ~(word) & EACH(0x80))

/* Whether 8 bytes have a quote, a backslash, a control character or a byte beyond ASCII. */
static inline int is_special(uint64_t word)
{
    uint64_t found = HAS_ZERO(word ^ EACH('"')) | HAS_ZERO(word ^ EACH('\\')) |
                     HAS_ZERO(word & EACH(0xe0)) | (word & EACH(0x80));
    return found != 0;
}

const uint8_t *string_end(const uint8_t *at, const uint8_t *stop, const uint8_t *end,
                          int checks_utf8, int *has_escape, int *is_closed)
{
    while (at < stop) {
        uint64_t word;
        while (end - at >= 8 && at < stop) {
            memcpy(&word, at, 8);
            if (is_special(word))
                break;
            at += 8;
        }
        if (at >= stop)
            break;
        uint8_t byte = *at;
        if (byte == '"') {
            *is_closed = 1;
            return at + 1;
        }
        if (byte == '\\') {
            uint32_t code;
            int bytes = escape_bytes(at, end, &code);
            if (!bytes)
                return NULL;
            *has_escape = 1;
            at += bytes;
        } else if (byte < 0x20)
            return NULL;
        else if (byte >= 0x80 && checks_utf8) {
            int bytes = utf8_bytes(at, end);
            if (!bytes)
                return NULL;
            at += bytes;
        } else
            at++;
    }
    return at;
}

static ptrdiff_t put_character(uint8_t *to, uint32_t code)
{
    if (code < 0x80) {
        to[0] = (uint8_t)code;
        return 1;
    }
    if (code < 0x800) {
        to[0] = (uint8_t)(0xc0 | code >> 6);
        to[1] = (uint8_t)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        to[0] = (uint8_t)(0xe0 | code >> 12);
        to[1] = (uint8_t)(0x80 | (code >> 6 & 0x3f));
        to[2] = (uint8_t)(0x80 | (code & 0x3f));
        return 3;
    }
    to[0] = (uint8_t)(0xf0 | code >> 18);
    to[1] = (uint8_t)(0x80 | (code >> 12 & 0x3f));
    to[2] = (uint8_t)(0x80 | (code >> 6 & 0x3f));
    to[3] = (uint8_t)(0x80 | (code & 0x3f));
    return 4;
}

ptrdiff_t unescape(const uint8_t *at, const uint8_t *end, uint8_t *to)
{
    uint8_t *begin = to;
    while (at < end) {
        if (*at != '\\') {
            *to++ = *at++;
            continue;
        }
        uint32_t code;
        at += escape_bytes(at, end, &code);
        to += put_character(to, code);
    }
    return to - begin;
}
