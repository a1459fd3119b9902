/* Reads of files that a thread begins and takes later (Linux' own AIO): the disk works while the thread asks somebody, and a disk that
   hangs costs nobody more than the time that he meant to wait. Without the kernel's header there are none, and callers do without. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NS_PER_S 1000000000

/* Room for one read at a time in *context; 0, or -errno. */
EXPORT int64_t forebay_reads_open(uint64_t *context) {
    *context = 0;
    return syscall(SYS_io_setup, 1, context) ? -errno : 0;
}

EXPORT void forebay_reads_close(uint64_t context) { syscall(SYS_io_destroy, context); }

/* Begin to read `count` bytes at `at` of a file into `into`, which stays until the end; 0, or -errno. */
EXPORT int64_t forebay_read_begin(uint64_t context, int fd, uint8_t *into, int64_t count, int64_t at) {
    struct iocb read;
    memset(&read, 0, sizeof read);
    read.aio_lio_opcode = IOCB_CMD_PREAD;
    read.aio_fildes = (uint32_t)fd;
    read.aio_buf = (uintptr_t)into;
    read.aio_nbytes = (uint64_t)count;
    read.aio_offset = at;
    struct iocb *reads[] = {&read};
    long taken = syscall(SYS_io_submit, context, 1, reads);
    return taken == 1 ? 0 : taken < 0 ? -errno : -EAGAIN;
}

/* Wait for the read that was begun: its count or -errno in *result, and 0; or -errno if it has not ended (-EAGAIN: in time). */
EXPORT int64_t forebay_read_end(uint64_t context, int64_t wait_ns, int64_t *result) {
    struct io_event event;
    struct timespec wait = {wait_ns / NS_PER_S, wait_ns % NS_PER_S};
    long ended = syscall(SYS_io_getevents, context, 1, 1, &event, &wait);
    if (ended != 1) return ended < 0 ? -errno : -EAGAIN;
    *result = event.res;
    return 0;
}
