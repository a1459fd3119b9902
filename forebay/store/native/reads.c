/* Reads of files that a thread begins and takes later (Linux' own AIO): the disk works while the thread asks somebody, and a disk that
   hangs costs nobody more than the time that he meant to wait. Without the kernel's header there are none, and callers do without. */
#define _GNU_SOURCE
#include "copying.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NS_PER_S 1000000000

enum { IDLE, PREPARED, UNDER_WAY, ENDED };

/* One read of a thread, which fills in what is to be read: `count` bytes at `at` of file `fd` into `into`, which stays until the end.
   If `target_bytes`, as many from `skip` on are then to be copied to `target`. reads.py has the same structure. */
typedef struct {
    uint64_t context; /* the kernel's */
    uint8_t *into;
    int64_t at, count;
    uint8_t *target;
    int64_t skip, target_bytes;
    int64_t result;  /* once ENDED: the count, or -errno */
    int32_t fd, state;
    int32_t copied;  /* whether `target` is filled, with the CRC32C `crc` */
    uint32_t crc;
} Read;

/* Room for one read at a time in *context; 0, or -errno. */
EXPORT int64_t forebay_reads_open(uint64_t *context) {
    *context = 0;
    return syscall(SYS_io_setup, 1, context) ? -errno : 0;
}

EXPORT void forebay_reads_close(uint64_t context) { syscall(SYS_io_destroy, context); }

/* Begin the PREPARED read. It has ENDED, with -errno, if the kernel does not take it. */
EXPORT void forebay_read_begin(Read *read) {
    struct iocb block;
    memset(&block, 0, sizeof block);
    block.aio_lio_opcode = IOCB_CMD_PREAD;
    block.aio_fildes = (uint32_t)read->fd;
    block.aio_buf = (uintptr_t)read->into;
    block.aio_nbytes = (uint64_t)read->count;
    block.aio_offset = read->at;
    struct iocb *blocks[] = {&block};
    long taken = syscall(SYS_io_submit, read->context, 1, blocks);
    read->state = taken == 1 ? UNDER_WAY : ENDED;
    read->result = taken < 0 ? -errno : -EAGAIN;
}

/* Wait for the read that is UNDER_WAY; 0 once it has ENDED, or -errno if it has not (-EAGAIN: in time). */
EXPORT int64_t forebay_read_end(Read *read, int64_t wait_ns) {
    struct io_event event;
    struct timespec wait = {wait_ns / NS_PER_S, wait_ns % NS_PER_S};
    long ended = syscall(SYS_io_getevents, read->context, 1, 1, &event, &wait);
    if (ended != 1) return ended < 0 ? -errno : -EAGAIN;
    read->result = event.res;
    read->state = ENDED;
    return 0;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)NS_PER_S + now.tv_nsec;
}

static void copy_if_whole(Read *read) {
#ifdef __SSE4_2__
    if (read->result == read->count && read->target_bytes) {
        read->crc = copy_crc32c(read->target, read->into + read->skip, read->target_bytes, 0, 0);
        read->copied = 1;
    }
#endif
}

static void take_if_ended(Read *read) {
    if (!forebay_read_end(read, 0)) copy_if_whole(read);
}

/* Whether somebody else's lock is on byte `mark` of file `fd`. */
static int is_locked(int fd, int64_t mark) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = mark, .l_len = 1};
    return !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;
}

/* Begin the PREPARED read, and wait until it has ENDED: look for that over and over for `poll_ns`, then sleep for `wait_ns` at most.
   0 if it has, or -errno: -ENOLCK if byte `mark` of file `lock` turned out not to be locked meanwhile, and nothing was waited for. */
EXPORT int64_t forebay_read_locked(Read *read, int lock, int64_t mark, int64_t poll_ns, int64_t wait_ns) {
    forebay_read_begin(read);
    if (!is_locked(lock, mark)) return -ENOLCK;
    int64_t until = now_ns() + poll_ns;
    while (read->state == UNDER_WAY && now_ns() < until) take_if_ended(read);
    if (read->state != UNDER_WAY) return 0;
    int64_t failed = forebay_read_end(read, wait_ns);
    if (!failed) copy_if_whole(read);
    return failed;
}

/* Begin the PREPARED read, send all of `frame`, and receive what comes first: the count (0: the peer closed), or -errno; *sent: how much
   of the frame has left. Answer and data are looked for over and over for `poll_ns`, since being woken up takes a core that went to
   sleep tens of us; then only the answer is waited for. */
EXPORT int64_t forebay_read_asking(Read *read, int socket, const uint8_t *frame, int64_t count, uint8_t *answer, int64_t room,
                                   int64_t *sent, int64_t poll_ns) {
    forebay_read_begin(read);
    ssize_t done = send(socket, frame, (size_t)count, MSG_NOSIGNAL);
    *sent = done < 0 ? 0 : done;
    if (done < 0) return -errno;
    if (done < count) return -EINTR;
    int64_t until = now_ns() + poll_ns, heard = -EAGAIN;
    while ((heard == -EAGAIN || read->state == UNDER_WAY) && now_ns() < until) {
        if (heard == -EAGAIN) {
            heard = recv(socket, answer, (size_t)room, MSG_DONTWAIT);
            if (heard < 0) heard = -errno;
        }
        if (read->state == UNDER_WAY) take_if_ended(read);
    }
    if (heard != -EAGAIN) return heard;
    heard = recv(socket, answer, (size_t)room, 0);
    return heard < 0 ? -errno : heard;
}
