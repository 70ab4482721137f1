/* Updates a layer with AdamW and Muon in one pass. It reads the gradient, and Muon's directions. It reads and writes
 * the working copy, residual, m and v. With FP32 masters there is no residual, and with Muon no v; m and v are FP32
 * or bf16. The arithmetic is in update_elements.h.
 *
 * Every strip is copied into its thread's room of the journal before it is overwritten, and a unit is marked when it
 * is done (undo_log.py says why a kill at any instruction can then be undone).
 */

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#include "thread_pool.h"
#include "update_elements.h"

/* Units are this small so that a unit's room stays in the first-level cache. With units of 2^12 to 2^14 elements, or
 * units saved in one piece, an update on one core took twice as long. */
static const int64_t UNIT = 1 << 10, STRIP = 1 << 7;
/* Elements between a strip that is updated and the one that is prefetched then. 16 cores of an H100's host updated 5.7
 * Gparam/s, with 2^8 or 2^10 elements 5.3 and 5.5, without prefetching 5.0. */
static const int64_t AHEAD = 1 << 9;
static const int64_t LINE_BYTES = 64;
static const int64_t ITEM_UNITS = 32; /* that a thread takes at a time */
static const int64_t COPY_BYTES = 1 << 20, RECORD_WORDS = 8;

/* native_kernel.py packs these, and Part and Rates: 8-byte members only. */
typedef struct {
    int64_t serial;
    int64_t *records; /* one a thread, RECORD_WORDS apart: serial, first unit, number of units, saved elements */
    int64_t *marks;
    char *rooms;
    int64_t room_bytes; /* from one thread's to the next */
} Journal;

typedef struct {
    char *to;
    const char *from;
    int64_t nbytes, first_chunk;
} Copy;

/* ---- jobs ---- */

/* The task of update_item. */
typedef struct {
    Span *span;
    const Part *parts;
    int64_t num_parts, num_units;
    const Rates *rates;
    const Journal *journal;
} Update;

static int64_t part_of(const Update *update, int64_t unit) {
    int64_t low = 0, high = update->num_parts - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (update->parts[middle].first_unit <= unit)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The C library's memcpy, with the widest vectors. Behind a pointer, since GCC puts REP MOVS in place of a call whose
 * size it knows to be small: then one core of a Xeon updated 0.66 Gparam/s, with this 0.86 (state in its cache). */
static void *(*volatile c_memcpy)(void *, const void *, size_t) = memcpy;

/* Saves the old contents of elements [from, from + n) of a block of `count` elements that begins at `start`. The
 * room is laid out as in undo_log.py: working, residual, m and v of the block one after another, leaving out those
 * it lacks. */
static void save(const Part *part, int64_t start, int64_t count, int64_t from, int64_t n, int64_t moment_size,
                 char *room) {
    const int64_t working_size = part->residual ? 2 : 4;
    c_memcpy(room + working_size * from, (const char *)part->working + working_size * (start + from), working_size * n);
    room += working_size * count;
    if (part->residual) {
        c_memcpy(room + 2 * from, part->residual + start + from, 2 * n);
        room += 2 * count;
    }
    c_memcpy(room + moment_size * from, (const char *)part->m + moment_size * (start + from), moment_size * n);
    room += moment_size * count;
    if (part->v)
        c_memcpy(room + moment_size * from, (const char *)part->v + moment_size * (start + from), moment_size * n);
}

/* Prefetches the elements [at, at + STRIP) of an array of a part; NULL: there is no such array. Inlined, because
 * compilers leave out calls of functions that only prefetch. */
INLINE void prefetch_array(const void *array, int64_t itemsize, int64_t at) {
    if (!array)
        return;
    const char *first = (const char *)array + itemsize * at;
    for (int64_t byte = 0; byte < itemsize * STRIP; byte += LINE_BYTES)
        __builtin_prefetch(first + byte, 1, 2);
}

/* Prefetches what the strip from element `at` on reads, unless the part ends before the strip does. */
INLINE void prefetch(const Part *part, const Rates *rates, int64_t at) {
    const int64_t moment_size = rates->bf16_moments ? 2 : 4;
    if (at + STRIP > part->length)
        return;
    prefetch_array(part->gradient, rates->bf16_gradient ? 2 : 4, at);
    prefetch_array(part->working, part->residual ? 2 : 4, at);
    prefetch_array(part->residual, 2, at);
    prefetch_array(part->m, moment_size, at);
    prefetch_array(part->v, moment_size, at);
    prefetch_array(part->direction, 2, at);
}

/* Updates a unit strip by strip. A strip is saved right before it is overwritten, so that it is read from memory
 * only once. */
static void logged_unit(const Update *update, int64_t thread, int64_t unit, const Part *part, int64_t start,
                        int64_t count) {
    const Journal *journal = update->journal;
    int64_t *record = journal->records + RECORD_WORDS * thread;
    char *room = journal->rooms + journal->room_bytes * thread;
    __atomic_store_n(&record[0], 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE); /* no later store may come before it; likewise below */
    record[1] = unit;
    record[2] = 1;
    record[3] = 0;
    __atomic_store_n(&record[0], journal->serial, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    for (int64_t from = 0; from < count; from += STRIP) {
        const int64_t n = count - from < STRIP ? count - from : STRIP;
        prefetch(part, update->rates, start + from + AHEAD);
        save(part, start, count, from, n, update->rates->bf16_moments ? 2 : 4, room);
        __atomic_store_n(&record[3], from + n, __ATOMIC_RELEASE);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        update->span(part, update->rates, start + from, start + from + n);
    }
    __atomic_store_n(&journal->marks[unit], journal->serial, __ATOMIC_RELEASE);
}

static void update_unit(const Update *update, int64_t thread, int64_t unit, const Part *part) {
    const Journal *journal = update->journal;
    const int64_t start = (unit - part->first_unit) * UNIT, rest = part->length - start;
    const int64_t count = rest < UNIT ? rest : UNIT;
    if (!journal) {
        update->span(part, update->rates, start, start + count);
    } else if (__atomic_load_n(&journal->marks[unit], __ATOMIC_ACQUIRE) != journal->serial) {
        logged_unit(update, thread, unit, part, start, count);
    }
}

static void update_item(const void *task, int64_t thread, int64_t item) {
    const Update *update = (const Update *)task;
    const int64_t done = item * ITEM_UNITS, rest = update->num_units - done;
    const int64_t first = update->parts->first_unit + done;
    const int64_t stop = first + (rest < ITEM_UNITS ? rest : ITEM_UNITS);
    int64_t index = part_of(update, first);
    for (int64_t unit = first; unit < stop; unit++) {
        if (index + 1 < update->num_parts && update->parts[index + 1].first_unit == unit)
            index++;
        update_unit(update, thread, unit, &update->parts[index]);
    }
}

/* Copies with stores that bypass the caches: nobody reads the copy soon, and a cached store would read its line
 * first. */
static void stream(char *to, const char *from, int64_t nbytes) {
    int64_t done = 0;
#ifdef __x86_64__
    if ((uintptr_t)to % 16 == 0) {
        for (; done + 64 <= nbytes; done += 64) {
            const __m128i *source = (const __m128i *)(from + done);
            __m128i *target = (__m128i *)(to + done);
            const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
            const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
            _mm_stream_si128(target, a);
            _mm_stream_si128(target + 1, b);
            _mm_stream_si128(target + 2, c);
            _mm_stream_si128(target + 3, d);
        }
        _mm_sfence(); /* before the pool's release store, which does not order these */
    }
#endif
    memcpy(to + done, from + done, nbytes - done);
}

static void copy_chunk(const void *task, int64_t thread, int64_t chunk) {
    const Copy *copy = (const Copy *)task;
    (void)thread;
    while (chunk >= copy->first_chunk + (copy->nbytes + COPY_BYTES - 1) / COPY_BYTES)
        copy++;
    const int64_t start = (chunk - copy->first_chunk) * COPY_BYTES, rest = copy->nbytes - start;
    stream(copy->to + start, copy->from + start, rest < COPY_BYTES ? rest : COPY_BYTES);
}

/* ---- what Python calls ---- */

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the fastest variant for this CPU: 2 is AVX-512, 1 is AVX2 with FMA, 0 is neither. */
int64_t adamw_best_variant(void) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 2
               : 1;
#else
    return 0;
#endif
}

/* Starts `num_helpers` threads beside the caller's own. Returns NULL if they cannot be started. */
Pool *adamw_open(int64_t num_helpers) {
    return pool_open(num_helpers);
}

void adamw_close(Pool *pool) {
    pool_close(pool);
}

/* Updates the parts. Their units ascend without a gap, `num_units` in all. Without a journal (NULL) a kill tears
 * what is being updated. */
void adamw_update(Pool *pool, int64_t variant, const Part *parts, int64_t num_parts, int64_t num_units,
                  const Rates *rates, const Journal *journal) {
    const Update update = {VARIANTS[variant], parts, num_parts, num_units, rates, journal};
    pool_run(pool, update_item, &update, (num_units + ITEM_UNITS - 1) / ITEM_UNITS);
}

void adamw_copy(Pool *pool, const Copy *copies, int64_t num_chunks) {
    pool_run(pool, copy_chunk, copies, num_chunks);
}

#ifdef __cplusplus
}
#endif
