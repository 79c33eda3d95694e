/* Strings in the text of a JSON document: where they end, and what they mean. */

#ifndef DCPD_JSON_STRING_H
#define DCPD_JSON_STRING_H

#include <stddef.h>
#include <stdint.h>

/* Go on in a string, behind its first quote. Return the place behind the closing quote, and set
   `is_closed`; `stop` or a little more: it goes on there; NULL: it is unsound. Sets `has_escape` if
   it meets one. Bytes that are not UTF-8 are unsound only if `checks_utf8`. */
const uint8_t *string_end(const uint8_t *at, const uint8_t *stop, const uint8_t *end,
                          int checks_utf8, int *has_escape, int *is_closed);

/* Write a sound string without its escapes, which is not longer; return its bytes. */
ptrdiff_t unescape(const uint8_t *at, const uint8_t *end, uint8_t *to);

#endif
