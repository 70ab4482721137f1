/* Signal words in memory that several processes map: 8 bytes each, aligned to 8. A store releases, a load acquires. */

#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A futex is 32 bits wide: the half of the word that every small change changes. */
static uint32_t *low_half(int64_t *word) {
    return (uint32_t *)word + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

#ifdef __cplusplus
extern "C" {
#endif

int64_t word_load(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

void word_store(int64_t *word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Returns the new value. */
int64_t word_add(int64_t *word, int64_t n) { return __atomic_add_fetch(word, n, __ATOMIC_ACQ_REL); }

/* Sleeps until woken, at most timeout_ns, and not at all when the word is no longer `seen`. May return early. */
void word_wait(int64_t *word, int64_t seen, int64_t timeout_ns) {
    struct timespec timeout;
    timeout.tv_sec = timeout_ns / 1000000000;
    timeout.tv_nsec = timeout_ns % 1000000000;
    syscall(SYS_futex, low_half(word), FUTEX_WAIT, (uint32_t)seen, &timeout, 0, 0);
}

void word_wake(int64_t *word) { syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT32_MAX, 0, 0, 0); }

#ifdef __cplusplus
}
#endif
