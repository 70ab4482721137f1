/* Updates the elements of one parameter in one pass, with AdamW's or Muon's arithmetic. Moments in bf16 are widened
 * to FP32 before it and rounded after it. The parameter moves by the moments before they are rounded.
 *
 * Bit-equal to torch's fused AdamW and to torch.optim.Muon, with FMA: the order of operations below is the contract,
 * and nothing here may be contracted or reassociated by the compiler.
 */

#ifndef MEGATRAIN_UPDATE_ELEMENTS_H
#define MEGATRAIN_UPDATE_ELEMENTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "stochastic_rounding.h"

#define INLINE static inline __attribute__((always_inline))
#define RESTRICT __restrict

typedef struct {
    const void *gradient; /* bf16 or fp32 */
    void *working;        /* bf16, or the fp32 master where there is no residual */
    int16_t *residual;
    void *m, *v;          /* bf16 or fp32. If Muon trains the parameter, v is NULL and m is fp32 */
    const uint16_t *direction; /* bf16; NULL if AdamW trains the parameter */
    int64_t length, first_unit;
    int64_t counter; /* of the first element's random bits, modulo 2^32 */
    double decay, step_size; /* rounded to FP32 before use, as are those of Rates */
} Part;

typedef struct {
    double scale, m_weight, v_keep, v_weight, root, eps;
    double muon_weight; /* weight of the gradient in Muon's momentum */
    int64_t bf16_gradient, bf16_moments;
    int64_t vector; /* elements of torch's vectors: a parameter's rest beyond a multiple of it is rounded differently */
} Rates;

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* Element i of a gradient or a moment, which is bf16 or fp32. */
INLINE float value_at(const uint16_t *values16, const float *values32, int64_t i, int bf16) {
    return bf16 ? as_float((uint32_t)values16[i] << 16) : values32[i];
}

INLINE float master_at(const uint16_t *working, const int16_t *residual, const float *master, int64_t i, int split) {
    return split ? as_float(((uint32_t)working[i] << 16) + (uint32_t)(int32_t)residual[i]) : master[i];
}

INLINE void store(float next, uint16_t *working, int16_t *residual, float *master, int64_t i, int split) {
    if (split) {
        const uint32_t bits = as_bits(next), half = bits + 0x8000u;
        const int nan = next != next;
        working[i] = (uint16_t)(nan ? 0x7FC0u : half >> 16);
        residual[i] = (int16_t)(nan ? 0u : bits - (half & 0xFFFF0000u));
    } else {
        master[i] = next;
    }
}

INLINE void store_moment(float next, uint16_t *moment16, float *moment32, int64_t i, uint32_t random, int narrow) {
    if (narrow)
        moment16[i] = rounded(next, as_bits(next), random);
    else
        moment32[i] = next;
}

/* torch's lerp starts from the nearer end; `heavy`: that is `to`. At weight 1 the form in torch's tails makes zeros of
 * another sign. */
INLINE float lerp(float from, float to, float weight, int tail, int heavy) {
    const float way = to - from;
    return !heavy ? __builtin_fmaf(weight, way, from)
           : tail ? __builtin_fmaf(-way, 1.0f - weight, to)
                  : __builtin_fmaf(weight - 1.0f, way, to);
}

/* Updates elements [start, stop) of a part that AdamW trains. `split`, `bf16`, `tail`, `heavy` and `narrow` are
 * constants where this is inlined for a body. */
INLINE void elements(const Part *part, const Rates *rates, int64_t start, int64_t stop, int split, int bf16, int tail,
                     int heavy, int narrow) {
    const uint16_t *RESTRICT gradient16 = (const uint16_t *)part->gradient;
    const float *RESTRICT gradient32 = (const float *)part->gradient;
    uint16_t *RESTRICT working = (uint16_t *)part->working;
    float *RESTRICT master = (float *)part->working;
    int16_t *RESTRICT residual = part->residual;
    uint16_t *RESTRICT ms16 = (uint16_t *)part->m;
    float *RESTRICT ms = (float *)part->m;
    uint16_t *RESTRICT vs16 = (uint16_t *)part->v;
    float *RESTRICT vs = (float *)part->v;
    const uint32_t counter = (uint32_t)part->counter;
    const float scale = (float)rates->scale, m_weight = (float)rates->m_weight, v_keep = (float)rates->v_keep,
                v_weight = (float)rates->v_weight, decay = (float)part->decay, step_size = (float)part->step_size,
                root = (float)rates->root, eps = (float)rates->eps;
    for (int64_t i = start; i < stop; i++) {
        const float g = value_at(gradient16, gradient32, i, bf16) * scale;
        const float p = master_at(working, residual, master, i, split);
        const float old_v = value_at(vs16, vs, i, narrow);
        const float m = lerp(value_at(ms16, ms, i, narrow), g, m_weight, tail, heavy);
        const float v = tail ? __builtin_fmaf(old_v, v_keep, v_weight * g * g)
                             : __builtin_fmaf(v_weight * g, g, old_v * v_keep);
        const float next = p * decay + step_size * m / (sqrtf(v) / root + eps);
        const uint32_t random = narrow ? random_bits(counter + (uint32_t)i) : 0;
        store_moment(m, ms16, ms, i, random >> 16, narrow);
        store_moment(v, vs16, vs, i, random & 0xFFFFu, narrow);
        store(next, working, residual, master, i, split);
    }
}

/* Updates elements [start, stop) of a part that Muon trains. torch rounds tails like the rest here, except for the
 * sign of a zero in a heavy momentum. */
INLINE void muon_elements(const Part *part, const Rates *rates, int64_t start, int64_t stop, int split, int bf16,
                          int heavy) {
    const uint16_t *RESTRICT gradient16 = (const uint16_t *)part->gradient;
    const float *RESTRICT gradient32 = (const float *)part->gradient;
    const uint16_t *RESTRICT direction = part->direction;
    uint16_t *RESTRICT working = (uint16_t *)part->working;
    float *RESTRICT master = (float *)part->working;
    int16_t *RESTRICT residual = part->residual;
    float *RESTRICT ms = (float *)part->m;
    const float scale = (float)rates->scale, weight = (float)rates->muon_weight, decay = (float)part->decay,
                step_size = (float)part->step_size;
    for (int64_t i = start; i < stop; i++) {
        const float g = value_at(gradient16, gradient32, i, bf16) * scale;
        const float p = master_at(working, residual, master, i, split);
        const float next = __builtin_fmaf(step_size, as_float((uint32_t)direction[i] << 16), p * decay);
        ms[i] = lerp(ms[i], g, weight, 0, heavy);
        store(next, working, residual, master, i, split);
    }
}

INLINE void any_body(const Part *part, const Rates *rates, int64_t start, int64_t stop, int heavy, int narrow) {
    if (part->residual && rates->bf16_gradient)
        elements(part, rates, start, stop, 1, 1, 0, heavy, narrow);
    else if (part->residual)
        elements(part, rates, start, stop, 1, 0, 0, heavy, narrow);
    else if (rates->bf16_gradient)
        elements(part, rates, start, stop, 0, 1, 0, heavy, narrow);
    else
        elements(part, rates, start, stop, 0, 0, 0, heavy, narrow);
}

/* A tail has a few elements only: constants as in a body would not be worth the compiler's time there. */
INLINE void any_kind(const Part *part, const Rates *rates, int64_t start, int64_t stop, int heavy) {
    const int64_t body = part->length - part->length % rates->vector;
    const int64_t cut = stop < body ? stop : body > start ? body : start;
    if (rates->bf16_moments)
        any_body(part, rates, start, cut, heavy, 1);
    else
        any_body(part, rates, start, cut, heavy, 0);
    if (cut < stop)
        elements(part, rates, cut, stop, part->residual != NULL, rates->bf16_gradient != 0, 1, heavy,
                 rates->bf16_moments != 0);
}

INLINE void any_kind_of_muon(const Part *part, const Rates *rates, int64_t start, int64_t stop, int heavy) {
    if (part->residual && rates->bf16_gradient)
        muon_elements(part, rates, start, stop, 1, 1, heavy);
    else if (part->residual)
        muon_elements(part, rates, start, stop, 1, 0, heavy);
    else if (rates->bf16_gradient)
        muon_elements(part, rates, start, stop, 0, 1, heavy);
    else
        muon_elements(part, rates, start, stop, 0, 0, heavy);
}

typedef void Span(const Part *, const Rates *, int64_t start, int64_t stop);

#define VARIANT(name, target)                                                                   \
    target static void name(const Part *part, const Rates *rates, int64_t start, int64_t stop) { \
        if (part->direction && (float)rates->muon_weight < 0.5f)                                 \
            any_kind_of_muon(part, rates, start, stop, 0);                                       \
        else if (part->direction)                                                                \
            any_kind_of_muon(part, rates, start, stop, 1);                                       \
        else if ((float)rates->m_weight < 0.5f)                                                  \
            any_kind(part, rates, start, stop, 0);                                               \
        else                                                                                     \
            any_kind(part, rates, start, stop, 1);                                               \
    }

VARIANT(span_baseline, )
#ifdef __x86_64__
VARIANT(span_avx2, __attribute__((target("avx2,fma"))))
VARIANT(span_avx512, __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))))
static Span *const VARIANTS[] = {span_baseline, span_avx2, span_avx512};
#else
static Span *const VARIANTS[] = {span_baseline};
#endif

#endif
