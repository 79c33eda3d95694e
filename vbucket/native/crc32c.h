/* CRC-32C (Castagnoli): by the processor's instruction where it has one, else by tables. */

#ifndef DCPD_CRC32C_H
#define DCPD_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Chooses the fastest way. Call it once before `crc32c`. */
void crc32c_init(void);

/* The checksum of what `crc` is the checksum of, followed by these bytes; 0 is that of nothing. */
uint32_t crc32c(uint32_t crc, const uint8_t *data, size_t bytes);

/* The same, by tables. */
uint32_t crc32c_by_tables(uint32_t crc, const uint8_t *data, size_t bytes);

/* "sse4.2", "arm" or "tables". */
const char *crc32c_way(void);

#endif
