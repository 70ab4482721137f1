/* A pool of threads that work through the items of one job at a time, together with the caller's thread. */

#ifndef MEGATRAIN_THREAD_POOL_H
#define MEGATRAIN_THREAD_POOL_H

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>

/* Does one item. `task`: the job's data. `thread`: number of the thread; 0 is the caller. */
typedef void Job(const void *task, int64_t thread, int64_t item);

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed, finished;
    pthread_t *helpers;
    int64_t num_helpers;
    Job *job; /* NULL: there is none, or all its items are taken */
    const void *task;
    int64_t num_items, next_item, number, working, stopping;
} Pool;

typedef struct {
    Pool *pool;
    int64_t thread;
} Helper;

static void pool_work(Pool *pool, Job *job, const void *task, int64_t thread) {
    int64_t item;
    while ((item = __atomic_fetch_add(&pool->next_item, 1, __ATOMIC_RELAXED)) < pool->num_items)
        job(task, thread, item);
}

static void *pool_help(void *argument) {
    Helper helper = *(Helper *)argument;
    Pool *pool = helper.pool;
    int64_t seen = 0;
    free(argument);
    pthread_mutex_lock(&pool->mutex);
    while (!pool->stopping) {
        if (!pool->job || pool->number == seen) {
            pthread_cond_wait(&pool->changed, &pool->mutex);
            continue;
        }
        Job *job = pool->job;
        const void *task = pool->task;
        seen = pool->number;
        pool->working++;
        pthread_mutex_unlock(&pool->mutex);
        pool_work(pool, job, task, helper.thread);
        pthread_mutex_lock(&pool->mutex);
        if (!--pool->working)
            pthread_cond_signal(&pool->finished);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/* Runs a job and returns when all items are done. It does not wait for a helper that wakes up after the last item was
 * taken. */
static void pool_run(Pool *pool, Job *job, const void *task, int64_t num_items) {
    pthread_mutex_lock(&pool->mutex);
    pool->job = job;
    pool->task = task;
    pool->num_items = num_items;
    pool->next_item = 0;
    pool->number++;
    if (num_items > 1)
        pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
    pool_work(pool, job, task, 0);
    pthread_mutex_lock(&pool->mutex);
    pool->job = NULL;
    while (pool->working)
        pthread_cond_wait(&pool->finished, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

static void pool_close(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
    for (int64_t i = 0; i < pool->num_helpers; i++)
        pthread_join(pool->helpers[i], NULL);
    free(pool->helpers);
    free(pool);
}

static int pool_start_helper(Pool *pool) {
    Helper *helper = (Helper *)malloc(sizeof(Helper));
    if (!helper)
        return 0;
    helper->pool = pool;
    helper->thread = pool->num_helpers + 1;
    if (pthread_create(&pool->helpers[pool->num_helpers], NULL, pool_help, helper)) {
        free(helper);
        return 0;
    }
    pool->num_helpers++;
    return 1;
}

/* Starts `num_helpers` threads beside the caller's own. Returns NULL if they cannot be started. */
static Pool *pool_open(int64_t num_helpers) {
    sigset_t all, before;
    Pool *pool = (Pool *)calloc(1, sizeof(Pool));
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
    pthread_cond_init(&pool->finished, NULL);
    pool->helpers = (pthread_t *)calloc(num_helpers + 1, sizeof(pthread_t));
    sigfillset(&all); /* only threads that Python knows handle signals */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (pool->helpers && pool->num_helpers < num_helpers && pool_start_helper(pool))
        ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->helpers && pool->num_helpers == num_helpers)
        return pool;
    pool_close(pool);
    return NULL;
}

#endif
