/* Bytes of objects, copied and checked without the interpreter.

   Large copies go past the caches ("streamed"): what they write is of no use there before it is read again, and a store that fetches its
   line first moves half as much again. Each copy has a twin in Python (library.py); they agree byte for byte. */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#ifdef __SSE4_2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
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

static void copy_streamed(uint8_t *to, const uint8_t *from, size_t count) {
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
static void copy_streamed(uint8_t *to, const uint8_t *from, size_t count) { memcpy(to, from, count); }
#endif

/* ------------------------------------------------------------------------------------------ out of a segment */

typedef struct {
    _Atomic uint64_t stamp;
    uint64_t length;
    _Atomic uint32_t state;
} Header;

typedef struct {
    int64_t offset;
    uint64_t stamp;
    int64_t start;
    int64_t length;
    uint8_t *target;
} Slice;

enum { HEADER_BYTES = 64, LIVE = 2 };

static int is_live(const Header *header, const Slice *slice) {
    if (atomic_load_explicit(&header->state, memory_order_acquire) != LIVE) return 0;
    return atomic_load_explicit(&header->stamp, memory_order_relaxed) == slice->stamp &&
           header->length >= (uint64_t)(slice->start + slice->length);
}

/* Copy each slice whose header says before and after that it is what is wanted; good[i]: whether it was. The segment is `capacity` bytes. */
EXPORT void forebay_copy_out(const uint8_t *segment, int64_t capacity, const Slice *slices, int64_t count, int stream, uint8_t *good) {
    for (int64_t i = 0; i < count; i++) {
        const Slice *slice = &slices[i];
        good[i] = 0;
        if (slice->offset < 0 || slice->offset % LINE || slice->start < 0 || slice->length < 0) continue;
        int64_t room = capacity - HEADER_BYTES - slice->offset;
        if (slice->start > room || slice->length > room - slice->start) continue;
        const Header *header = (const Header *)(segment + slice->offset);
        if (!is_live(header, slice)) continue;
        const uint8_t *from = segment + slice->offset + HEADER_BYTES + slice->start;
        if (stream)
            copy_streamed(slice->target, from, (size_t)slice->length);
        else
            memcpy(slice->target, from, (size_t)slice->length);
        atomic_thread_fence(memory_order_acquire);
        good[i] = (uint8_t)is_live(header, slice);
    }
}

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

EXPORT uint32_t forebay_copy_crc32c(uint8_t *to, const uint8_t *from, int64_t count, uint32_t crc, int stream) {
    uint64_t open = ~crc;
    open &= 0xffffffffu;
    open = stream ? copy_summed(to, from, (size_t)count, open, 1) : copy_summed(to, from, (size_t)count, open, 0);
    return ~(uint32_t)open;
}
#endif

/* ------------------------------------------------------------------------------------------ one question to a server

   Whoever waits for the interpreter lock after each of a question's system calls waits three times; here it is once. */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Send all of `frame`, then receive what comes first. The count (0: the peer closed), or -errno; *sent: how much of the frame has left.
   The answer is first looked for over and over for `poll_ns`, since being woken up takes a core that went to sleep tens of us. */
EXPORT int64_t forebay_exchange(int socket, const uint8_t *frame, int64_t count, uint8_t *into, int64_t room, int64_t *sent,
                                int64_t poll_ns) {
    ssize_t done = send(socket, frame, (size_t)count, MSG_NOSIGNAL);
    *sent = done < 0 ? 0 : done;
    if (done < 0) return -errno;
    if (done < count) return -EINTR;
    for (int64_t until = poll_ns ? now_ns() + poll_ns : 0; until && now_ns() < until;) {
        done = recv(socket, into, (size_t)room, MSG_DONTWAIT);
        if (done >= 0 || errno != EAGAIN) return done < 0 ? -errno : done;
    }
    done = recv(socket, into, (size_t)room, 0);
    return done < 0 ? -errno : done;
}

/* Whether an idle connection was closed, or has bytes that nobody asked for. Never waits: to be called with the lock held. */
EXPORT int forebay_is_stale(int socket) {
    uint8_t byte;
    return recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}
