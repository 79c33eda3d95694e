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
#define LANE_BYTES 1360        /* three of them are a page but 16 bytes */

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

#if defined(DCPD_CRC_SSE)
#define WITH_CRC __attribute__((target("sse4.2")))
#define CRC_OF_WORD __builtin_ia32_crc32di
#define CRC_OF_BYTE __builtin_ia32_crc32qi
#elif defined(DCPD_CRC_ARM)
#ifdef __clang__
#define WITH_CRC __attribute__((target("crc")))
#else
#define WITH_CRC __attribute__((target("+crc")))
#endif
#define CRC_OF_WORD __crc32cd
#define CRC_OF_BYTE __crc32cb
#endif

#ifdef CRC_OF_WORD
static uint32_t after_lane[4][256]; /* a state's part in what it is after LANE_BYTES zeros */

/* Returns what a state is after LANE_BYTES zeros. */
static uint32_t skip_lane(uint32_t state)
{
    return after_lane[0][state & 0xFF] ^ after_lane[1][state >> 8 & 0xFF] ^
           after_lane[2][state >> 16 & 0xFF] ^ after_lane[3][state >> 24];
}

static uint64_t word_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, STEP);
    return word;
}

/* An instruction waits for the one before it, for three times as long as it takes. So long data is
   taken in three lanes at a time. A state is linear: what the lanes come to is XORed. */
WITH_CRC static uint32_t by_instruction(uint32_t crc, const uint8_t *data, size_t bytes)
{
    uint32_t state = ~crc;
    for (; bytes >= 3 * LANE_BYTES; data += 3 * LANE_BYTES, bytes -= 3 * LANE_BYTES) {
        uint64_t first = state, second = 0, third = 0;
        for (const uint8_t *at = data; at < data + LANE_BYTES; at += STEP) {
            first = CRC_OF_WORD(first, word_at(at));
            second = CRC_OF_WORD(second, word_at(at + LANE_BYTES));
            third = CRC_OF_WORD(third, word_at(at + 2 * LANE_BYTES));
        }
        state = skip_lane(skip_lane((uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    uint64_t rest = state;
    for (; bytes >= STEP; data += STEP, bytes -= STEP)
        rest = CRC_OF_WORD(rest, word_at(data));
    state = (uint32_t)rest;
    for (; bytes; data++, bytes--)
        state = CRC_OF_BYTE(state, *data);
    return ~state;
}

static void lanes_init(void)
{
    static const uint8_t zeros[LANE_BYTES];
    for (int part = 0; part < 4; part++)
        for (uint32_t byte = 1; byte < 256; byte++) {
            uint32_t high = byte & (byte - 1), low = byte ^ high; /* the lowest bit */
            after_lane[part][byte] =
                high ? after_lane[part][high] ^ after_lane[part][low]
                     : ~crc32c_by_tables(~(low << 8 * part), zeros, LANE_BYTES);
        }
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
#ifdef CRC_OF_WORD
    lanes_init();
#endif
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
