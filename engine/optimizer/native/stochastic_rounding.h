/* Rounds FP32 to bf16 stochastically, in the native kernel. stochastic_rounding.py does the same and says why. */

#ifndef MEGATRAIN_STOCHASTIC_ROUNDING_H
#define MEGATRAIN_STOCHASTIC_ROUNDING_H

#include <stdint.h>

#define ROUND_INLINE static inline __attribute__((always_inline))

/* The 32-bit finalizer of MurmurHash3. */
ROUND_INLINE uint32_t random_bits(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    return h ^ (h >> 16);
}

/* Returns the bits of a bf16. `random`: 16 random bits. No finite value is rounded beyond the largest bf16, and
 * infinities stay. A NaN becomes the canonical one. (Written so that compilers vectorise it.) */
ROUND_INLINE uint16_t rounded(float value, uint32_t bits, uint32_t random) {
    const uint32_t magnitude = bits & 0x7FFFFFFFu, sum = magnitude + random;
    const uint32_t most = magnitude > 0x7F7F0000u ? magnitude : 0x7F7F0000u;
    const uint32_t high = ((sum < most ? sum : most) | (bits & 0x80000000u)) >> 16;
    return (uint16_t)(value != value ? 0x7FC0u : high);
}

#endif
