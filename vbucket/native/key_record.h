/* Records of `by_key`: vbucket/store/key_record.py says what they hold. */

#ifndef DCPD_KEY_RECORD_H
#define DCPD_KEY_RECORD_H

#include "blocks.h"
#include "crc32c.h"

#define RECORD_BYTES 38
#define RECORD_CAS_AT 2
#define RECORD_SEQNO_AT 10
#define RECORD_REV_SEQNO_AT 18
#define RECORD_EXPIRY_AT 30
#define RECORD_CRC_AT 34

/* Whether these bytes are what was written for the key, which begins with its partition. */
static inline int record_is_sound(const uint8_t *key, size_t key_bytes, const uint8_t *record,
                                  size_t bytes)
{
    return bytes == RECORD_BYTES &&
           crc32c(crc32c(0, key, key_bytes), record, RECORD_CRC_AT) == be32(record + RECORD_CRC_AT);
}

#endif
