/* A few threads that run the items of one job after the other, in whatever order they come to them.

      main:   publish job g --> run items too --> wait until every item is done --> publish job g + 1 ...
      worker: claim an item of the newest job --> run it --> ... --> spin a while --> sleep until the next job

   An item is claimed by compare-and-swap of (job number, next item): whoever was put to sleep by the kernel between two items holds
   nobody up, since nobody waits for threads, only for items. Job descriptors lie in a ring; one that is read too late fails the swap. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pool.h"

#define RING 8
#define SPINS_BEFORE_SLEEP 4000 /* some 50 us: longer than the gaps inside a forward, shorter than those between two */
#define SPINS_BEFORE_YIELD 2000

typedef struct {
    Run run;
    void *context;
    int items;
    _Alignas(64) atomic_int done;
} Job;

struct Pool {
    int threads; /* with the caller's */
    pthread_t *workers;
    Job ring[RING];
    _Alignas(64) atomic_uint_fast64_t ticket; /* job number << 32 | next item */
    _Alignas(64) atomic_uint newest;          /* job number; what sleepers wait on */
    atomic_int sleepers;
    atomic_int stop;
};

typedef struct {
    Pool *pool;
    int thread;
} WorkerStart;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void run_items(Pool *pool, int thread) {
    for (;;) {
        uint64_t ticket = atomic_load(&pool->ticket);
        Job *job = &pool->ring[(ticket >> 32) % RING];
        Run run = job->run;
        void *context = job->context;
        int item = (int)(uint32_t)ticket;
        if (item >= job->items) return;
        if (!atomic_compare_exchange_strong(&pool->ticket, &ticket, ticket + 1)) continue;
        run(context, item, thread);
        atomic_fetch_add(&job->done, 1);
    }
}

static void *work(void *given) {
    WorkerStart start = *(WorkerStart *)given;
    Pool *pool = start.pool;
    free(given);
    unsigned seen = 0;
    while (!atomic_load(&pool->stop)) {
        unsigned newest = atomic_load(&pool->newest);
        for (int spin = 0; newest == seen && spin < SPINS_BEFORE_SLEEP; spin++) {
            relax();
            newest = atomic_load(&pool->newest);
        }
        if (newest == seen) {
            atomic_fetch_add(&pool->sleepers, 1);
            syscall(SYS_futex, &pool->newest, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            atomic_fetch_sub(&pool->sleepers, 1);
            continue;
        }
        seen = newest;
        run_items(pool, start.thread);
    }
    return NULL;
}

void pool_run(Pool *pool, Run run, void *context, int items) {
    if (pool->threads == 1 || items <= 1) {
        for (int item = 0; item < items; item++) run(context, item, 0);
        return;
    }
    unsigned number = atomic_load(&pool->newest) + 1;
    Job *job = &pool->ring[number % RING];
    /* While this is written, a late worker may still look: no items until the ticket names this job. */
    job->run = run;
    job->context = context;
    job->items = items;
    atomic_store(&job->done, 0);
    atomic_store(&pool->ticket, (uint64_t)number << 32);
    atomic_store(&pool->newest, number);
    if (atomic_load(&pool->sleepers)) syscall(SYS_futex, &pool->newest, FUTEX_WAKE_PRIVATE, pool->threads, NULL, NULL, 0);
    run_items(pool, 0);
    for (int spin = 0; atomic_load(&job->done) < items; spin++) {
        if (spin < SPINS_BEFORE_YIELD) relax();
        else sched_yield();
    }
}

void pool_close(Pool *pool) {
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->newest, 1);
    syscall(SYS_futex, &pool->newest, FUTEX_WAKE_PRIVATE, pool->threads, NULL, NULL, 0);
    for (int i = 0; i < pool->threads - 1; i++) pthread_join(pool->workers[i], NULL);
    free(pool->workers);
    free(pool);
}

Pool *pool_open(int threads) {
    Pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->threads = 1;
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    if (!pool->workers) {
        free(pool);
        return NULL;
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < threads; i++) {
        WorkerStart *start = malloc(sizeof *start);
        if (start) *start = (WorkerStart){pool, i};
        if (!start || pthread_create(&pool->workers[i - 1], NULL, work, start)) {
            free(start);
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            pool_close(pool);
            return NULL;
        }
        pool->threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool;
}
