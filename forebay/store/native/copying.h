/* Copies: past the caches, and with the CRC32C of what is copied.

   Large copies go past the caches ("streamed"): what they write is of no use there before it is read again, and a store that fetches its
   line first moves half as much again. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE4_2__
#include <immintrin.h>
#endif

#define LINE 64
#define AHEAD 2048 /* bytes read ahead: some memory latencies of copying */

/* ------------------------------------------------------------------------------------------ copying */

#ifdef __AVX__
typedef __m256i Vector;
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define STORE(to, vector) _mm256_storeu_si256((__m256i *)(to), vector)
#define STREAM(to, vector) _mm256_stream_si256((__m256i *)(to), vector)
#elif defined(__SSE4_2__)
typedef __m128i Vector;
#define LOAD(from) _mm_loadu_si128((const __m128i *)(from))
#define STORE(to, vector) _mm_storeu_si128((__m128i *)(to), vector)
#define STREAM(to, vector) _mm_stream_si128((__m128i *)(to), vector)
#endif

#ifdef __SSE4_2__
#define VECTORS (LINE / (int)sizeof(Vector))

static inline void copy_line(uint8_t *to, const uint8_t *from, int stream) {
    Vector line[VECTORS];
    for (int i = 0; i < VECTORS; i++) line[i] = LOAD(from + i * sizeof(Vector));
    for (int i = 0; i < VECTORS; i++) {
        if (stream)
            STREAM(to + i * sizeof(Vector), line[i]);
        else
            STORE(to + i * sizeof(Vector), line[i]);
    }
}

static size_t head_bytes(const uint8_t *to, size_t count) {
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    return head < count ? head : count;
}

static inline void copy_streamed(uint8_t *to, const uint8_t *from, size_t count) {
    size_t head = head_bytes(to, count), at = head;
    memcpy(to, from, head);
    for (; at + LINE <= count; at += LINE) {
        _mm_prefetch((const char *)from + at + AHEAD, _MM_HINT_NTA);
        copy_line(to + at, from + at, 1);
    }
    memcpy(to + at, from + at, count - at);
    _mm_sfence();
}
#else
static inline void copy_streamed(uint8_t *to, const uint8_t *from, size_t count) { memcpy(to, from, count); }
#endif

/* ------------------------------------------------------------------------------------------ CRC32C on the way */

#ifdef __SSE4_2__
/* Three streams at once hide the instruction's latency; their checksums are joined by advancing one over the other's bytes, which is a
   multiplication by x^(8 n) modulo the polynomial (Gopal et al., "Fast CRC computation for iSCSI polynomial using CRC32 instruction"). */
#define STREAM_BYTES 8192
#define POLYNOMIAL 0x82f63b78u /* Castagnoli, bits reversed */

static uint32_t advance_table[4][256]; /* [byte of the checksum][its value] -> checksum after STREAM_BYTES zero bytes */

static uint32_t after_zeros(uint32_t crc, int count) {
    while (count--) crc = _mm_crc32_u8(crc, 0);
    return crc;
}

__attribute__((constructor)) static void fill_advance_table(void) {
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; bit++) of_bit[bit] = after_zeros(1u << bit, STREAM_BYTES);
    for (int byte = 0; byte < 4; byte++)
        for (int value = 0; value < 256; value++) {
            uint32_t sum = 0;
            for (int bit = 0; bit < 8; bit++)
                if (value >> bit & 1) sum ^= of_bit[8 * byte + bit];
            advance_table[byte][value] = sum;
        }
}

static inline uint32_t advance(uint32_t crc) {
    return advance_table[0][crc & 255] ^ advance_table[1][crc >> 8 & 255] ^ advance_table[2][crc >> 16 & 255] ^ advance_table[3][crc >> 24];
}

/* The checksum is of the registers that are stored, so it holds for what is in `to` whatever others do to `from` meanwhile. */
static inline uint64_t copy_summed_line(uint8_t *to, const uint8_t *from, uint64_t crc, int stream) {
    uint64_t words[LINE / 8];
    memcpy(words, from, LINE);
    copy_line(to, (const uint8_t *)words, stream);
    for (int i = 0; i < LINE / 8; i++) crc = _mm_crc32_u64(crc, words[i]);
    return crc;
}

static uint64_t copy_summed_tail(uint8_t *to, const uint8_t *from, size_t count, uint64_t crc) {
    size_t at = 0;
    for (uint64_t word; at + 8 <= count; at += 8) {
        memcpy(&word, from + at, 8);
        memcpy(to + at, &word, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    for (; at < count; at++) crc = _mm_crc32_u8((uint32_t)crc, to[at] = from[at]);
    return crc;
}

static inline uint64_t copy_summed(uint8_t *to, const uint8_t *from, size_t count, uint64_t crc, int stream) {
    size_t at = head_bytes(to, count);
    crc = copy_summed_tail(to, from, at, crc);
    for (; at + 3 * STREAM_BYTES <= count; at += 2 * STREAM_BYTES) {
        uint64_t second = 0, third = 0;
        for (size_t end = at + STREAM_BYTES; at < end; at += LINE) {
            crc = copy_summed_line(to + at, from + at, crc, stream);
            second = copy_summed_line(to + at + STREAM_BYTES, from + at + STREAM_BYTES, second, stream);
            third = copy_summed_line(to + at + 2 * STREAM_BYTES, from + at + 2 * STREAM_BYTES, third, stream);
        }
        crc = advance((uint32_t)crc) ^ second;
        crc = advance((uint32_t)crc) ^ third;
    }
    crc = copy_summed_tail(to + at, from + at, count - at, crc);
    if (stream) _mm_sfence();
    return crc;
}

static uint32_t copy_crc32c(uint8_t *to, const uint8_t *from, int64_t count, uint32_t crc, int stream) {
    uint64_t open = ~crc;
    open &= 0xffffffffu;
    open = stream ? copy_summed(to, from, (size_t)count, open, 1) : copy_summed(to, from, (size_t)count, open, 0);
    return ~(uint32_t)open;
}
#endif

/* ------------------------------------------------------------------------------------------ the trial

   What a new library is tried with, in a process of its own (forebay/compiled.py): whatever a processor says that it knows, an instruction
   that traps ends that process. ns, or -1 if a copy or a checksum is wrong. */
#include <time.h>

__attribute__((visibility("default"))) int64_t forebay_trial(void) {
    enum { COUNT = 4 * 8192 + 77 };
    static uint8_t from[COUNT + LINE], to[COUNT + LINE];
    struct timespec began, ended;
    int good = 1;
    for (int i = 0; i < COUNT; i++) from[i] = (uint8_t)(i * 31 + (i >> 8));
    clock_gettime(CLOCK_MONOTONIC, &began);
    copy_streamed(to + 1, from, COUNT);
    good &= !memcmp(to + 1, from, COUNT);
#ifdef __SSE4_2__
    for (int stream = 0; stream < 2; stream++) {
        memset(to, 0, sizeof to);
        /* "123456789" has a checksum that every description of CRC32C gives. */
        good &= copy_crc32c(to, (const uint8_t *)"123456789", 9, 0, stream) == 0xe3069283u;
        uint32_t whole = copy_crc32c(to, from, COUNT, 0, stream), half = copy_crc32c(to, from, COUNT / 2, 0, stream);
        good &= copy_crc32c(to + COUNT / 2, from + COUNT / 2, COUNT - COUNT / 2, half, stream) == whole;
        good &= !memcmp(to, from, COUNT);
    }
#endif
    clock_gettime(CLOCK_MONOTONIC, &ended);
    return good ? (ended.tv_sec - began.tv_sec) * INT64_C(1000000000) + ended.tv_nsec - began.tv_nsec : -1;
}
