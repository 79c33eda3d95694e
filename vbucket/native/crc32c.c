/* See crc32c.h. */

#include "crc32c.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define DCPD_CRC_SSE 1
#elif defined(__AARCH64EL__) && defined(__GNUC__) && (defined(__linux__) || defined(__APPLE__))
#define DCPD_CRC_ARM 1
#include <arm_acle.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

#define POLYNOMIAL 0x82F63B78u /* Castagnoli, reflected */
#define STEP 8                 /* bytes that one step takes */

static uint32_t tables[STEP][256];
static const char *way = "tables";
static uint32_t (*fastest)(uint32_t, const uint8_t *, size_t) = crc32c_by_tables;

uint32_t crc32c_by_tables(uint32_t crc, const uint8_t *data, size_t bytes)
{
    crc = ~crc;
    for (; bytes >= STEP; data += STEP, bytes -= STEP) {
        uint32_t next = 0;
        for (int i = 0; i < 4; i++)
            next ^= tables[7 - i][(crc >> 8 * i & 0xFF) ^ data[i]];
        for (int i = 4; i < 8; i++)
            next ^= tables[7 - i][data[i]];
        crc = next;
    }
    for (; bytes; data++, bytes--)
        crc = crc >> 8 ^ tables[0][(crc ^ *data) & 0xFF];
    return ~crc;
}

#ifdef DCPD_CRC_SSE
__attribute__((target("sse4.2"))) static uint32_t by_instruction(
    uint32_t crc, const uint8_t *data, size_t bytes)
{
    uint64_t state = ~crc & 0xFFFFFFFFu;
    for (; bytes >= STEP; data += STEP, bytes -= STEP) {
        uint64_t word;
        memcpy(&word, data, STEP);
        state = __builtin_ia32_crc32di(state, word);
    }
    crc = (uint32_t)state;
    for (; bytes; data++, bytes--)
        crc = __builtin_ia32_crc32qi(crc, *data);
    return ~crc;
}
#endif

#ifdef DCPD_CRC_ARM
#ifdef __clang__
#define WITH_CRC __attribute__((target("crc")))
#else
#define WITH_CRC __attribute__((target("+crc")))
#endif
WITH_CRC static uint32_t by_instruction(uint32_t crc, const uint8_t *data, size_t bytes)
{
    crc = ~crc;
    for (; bytes >= STEP; data += STEP, bytes -= STEP) {
        uint64_t word;
        memcpy(&word, data, STEP);
        crc = __crc32cd(crc, word);
    }
    for (; bytes; data++, bytes--)
        crc = __crc32cb(crc, *data);
    return ~crc;
}
#endif

void crc32c_init(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][byte] = crc;
    }
    for (int step = 1; step < STEP; step++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = tables[step - 1][byte];
            tables[step][byte] = crc >> 8 ^ tables[0][crc & 0xFF];
        }
#if defined(DCPD_CRC_SSE)
    if (__builtin_cpu_supports("sse4.2")) {
        fastest = by_instruction;
        way = "sse4.2";
    }
#elif defined(DCPD_CRC_ARM) && defined(__linux__)
    if (getauxval(AT_HWCAP) & 1 << 7) { /* HWCAP_CRC32 */
        fastest = by_instruction;
        way = "arm";
    }
#elif defined(DCPD_CRC_ARM)
    fastest = by_instruction; /* every Mac with this processor has it */
    way = "arm";
#endif
}

uint32_t crc32c(uint32_t crc, const uint8_t *data, size_t bytes)
{
    return fastest(crc, data, bytes);
}

const char *crc32c_way(void)
{
    return way;
}
