/* Bytes of objects, copied and checked without the interpreter. Each copy has a twin in Python (library.py); they agree byte for byte. */
#include "copying.h"
#include <errno.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

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

#ifdef __SSE4_2__
EXPORT uint32_t forebay_copy_crc32c(uint8_t *to, const uint8_t *from, int64_t count, uint32_t crc, int stream) {
    return copy_crc32c(to, from, count, crc, stream);
}
#endif

/* ------------------------------------------------------------------------------------------ one question to a server

   Whoever waits for the interpreter lock after each of a question's system calls waits three times; here it is once. */

enum { MOST_RESTS = 128 };
static __thread int rests_next = 1, rests_left; /* a thread that looked in vain lets 1, 2, 4, .. answers come without looking */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Look for an answer over and over for `look_ns`: waking a core that went to sleep takes tens of us. On a machine that is busy the answer
   does not come so soon, and looking would only keep a core from those who make it. -EAGAIN: there is none yet. */
static int64_t look(int socket, uint8_t *into, int64_t room, int64_t look_ns) {
    if (!look_ns || rests_left) {
        rests_left -= look_ns && rests_left;
        return -EAGAIN;
    }
    int64_t until = now_ns() + look_ns;
    do {
        ssize_t done = recv(socket, into, (size_t)room, MSG_DONTWAIT);
        if (done >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
            rests_next = 1;
            return done < 0 ? -errno : done;
        }
    } while (now_ns() < until);
    rests_left = rests_next;
    rests_next = rests_next < MOST_RESTS ? 2 * rests_next : MOST_RESTS;
    return -EAGAIN;
}

/* Send all of `frame`, then receive what comes first, which is looked for for `look_ns`, then waited for. The count (0: the peer closed),
   or -errno; *sent: how much of the frame has left. */
EXPORT int64_t forebay_exchange(int socket, const uint8_t *frame, int64_t count, uint8_t *into, int64_t room, int64_t *sent,
                                int64_t look_ns) {
    ssize_t done = send(socket, frame, (size_t)count, MSG_NOSIGNAL);
    *sent = done < 0 ? 0 : done;
    if (done < 0) return -errno;
    if (done < count) return -EINTR;
    int64_t heard = look(socket, into, room, look_ns);
    if (heard != -EAGAIN) return heard;
    done = recv(socket, into, (size_t)room, 0);
    return done < 0 ? -errno : done;
}

/* Whether an idle connection was closed, or has bytes that nobody asked for. Never waits: to be called with the lock held. */
EXPORT int forebay_is_stale(int socket) {
    uint8_t byte;
    return recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}
