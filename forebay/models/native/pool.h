/* A few threads that run the items of one job after the other (native/pool.c). */
#ifndef FOREBAY_POOL_H
#define FOREBAY_POOL_H

typedef void (*Run)(void *context, int item, int thread);

typedef struct Pool Pool;

/* NULL if there is no memory for it or a thread cannot be had. Workers take no signals. */
Pool *pool_open(int threads);

/* Run items 0 .. items - 1 of a job on all threads; returns when all are done. One caller at a time. */
void pool_run(Pool *pool, Run run, void *context, int items);

void pool_close(Pool *pool);

#endif
