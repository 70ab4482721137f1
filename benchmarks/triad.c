/* STREAM's triad on a span of a thread. */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

void triad(float *__restrict a, const float *__restrict b, const float *__restrict c, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        a[i] = b[i] + 3.0f * c[i];
}

#ifdef __cplusplus
}
#endif
