/* 16-bit floats to fp32 and back, and random bits, over arrays.

   In: at most BLOCK numbers. Out: as many. Everything is integer arithmetic that a
   compiler can turn into vector instructions; rounding and every NaN are those of
   split_codec.py, kahan_codec.py, stochastic_codec.py. */

#ifndef HALFSTEP_BITS_H
#define HALFSTEP_BITS_H

#include <stdint.h>
#include <string.h>

#if defined(__F16C__) && !defined(HALFSTEP_PORTABLE)
#include <immintrin.h>
#endif

typedef uint16_t half; /* the bits of a bf16 or an fp16 */

enum { BLOCK = 512 };

#define INFINITE 0x7f800000u
#define MAGNITUDE 0x7fffffffu

static inline uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* A carry makes zero of some NaN, and cutting the low half infinity of others. */
static inline uint32_t keep_nan(uint32_t bits, uint32_t rounded) {
    return (bits & MAGNITUDE) > INFINITE ? (bits >> 16) | 0x40 : rounded;
}

/* bf16 */

static inline float wide(half number) { return float_of((uint32_t)number << 16); }

static inline half nearest(float number) {
    uint32_t bits = bits_of(number);
    return (half)keep_nan(bits, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* No draw carries into infinity. */
static inline half drawn(float number, uint32_t sixteen) {
    uint32_t bits = bits_of(number), high = bits >> 16;
    uint32_t carry = ((bits & 0xffff) + sixteen) >> 16;
    carry = (high & 0x7fff) < 0x7f7f ? carry : 0;
    return (half)keep_nan(bits, high + carry);
}

static void widen(const half *restrict from, float *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = wide(from[i]);
}

static void publish(const float *restrict from, half *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = nearest(from[i]);
}

static void draw_high(const float *restrict from, half *restrict to,
                      const uint32_t *restrict random, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = drawn(from[i], random[i] >> 16);
}

static void draw_low(const float *restrict from, half *restrict to,
                     const uint32_t *restrict random, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = drawn(from[i], random[i] & 0xffff);
}

/* bf16 with 16 more bits: see split_codec.py. */

static void split_decode(const half *restrict weight, const uint16_t *restrict rest,
                         float *restrict truth, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t high = weight[i], low = rest[i], size = high & 0x7fff;
        /* Only these were ever carried into: not zero, and not NaN. */
        uint32_t carried = (low >> 15) & (size - 1 < INFINITE >> 16);
        truth[i] = float_of(((high - carried) << 16) | low);
    }
}

static void split_encode(const float *restrict truth, half *restrict weight,
                         uint16_t *restrict rest, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(truth[i]);
        rest[i] = (uint16_t)bits;
        weight[i] = (half)keep_nan(bits, (bits + 0x8000) >> 16);
    }
}

/* bf16 and what is missing from it: see kahan_codec.py. */

static void kahan_decode(const half *restrict weight, const half *restrict missing,
                         float *restrict truth, int64_t n) {
    for (int64_t i = 0; i < n; i++) truth[i] = wide(weight[i]) + wide(missing[i]);
}

static void kahan_encode(const float *restrict truth, half *restrict weight,
                         half *restrict missing, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        half high = nearest(truth[i]);
        half low = nearest(truth[i] - wide(high));
        weight[i] = high;
        missing[i] = (high & 0x7f80) == 0x7f80 ? 0 : low;
    }
}

/* fp16: rounded to nearest even, subnormal numbers too. */

static inline float wide16(half number) {
    uint32_t size = number & 0x7fff, sign = (uint32_t)(number & 0x8000) << 16;
    uint32_t normal = (size << 13) + (112u << 23);
    uint32_t special = (size << 13) | INFINITE | (size > 0x7c00 ? 0x400000 : 0);
    uint32_t subnormal = bits_of((float)(int32_t)size * 0x1p-24f);
    uint32_t bits = size < 0x400 ? subnormal : size < 0x7c00 ? normal : special;
    return float_of(bits | sign);
}

static inline half nearest16(float number) {
    uint32_t size = bits_of(number) & MAGNITUDE, sign = bits_of(number) >> 31 << 15;
    uint32_t normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    uint32_t nan = 0x7e00 | ((size >> 13) & 0x3ff);
    /* Beside 0.5 an fp32 has steps of 2**-24, as a subnormal fp16 has. */
    uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    uint32_t finite = size < 0x38800000 ? subnormal : normal;
    uint32_t special = size > INFINITE ? nan : 0x7c00;
    return (half)(sign | (size < 0x47800000 ? finite : special));
}

static void widen16(const half *restrict from, float *restrict to, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__) && !defined(HALFSTEP_PORTABLE)
    for (; i + 8 <= n; i += 8) {
        __m128i eight = _mm_loadu_si128((const __m128i *)(from + i));
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(eight));
    }
#endif
    for (; i < n; i++) to[i] = wide16(from[i]);
}

static void publish16(const float *restrict from, half *restrict to, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__) && !defined(HALFSTEP_PORTABLE)
    for (; i + 8 <= n; i += 8) {
        __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i),
                                        _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(to + i), eight);
    }
#endif
    for (; i < n; i++) to[i] = nearest16(from[i]);
}

/* Random numbers without state: see stochastic_codec.py. */

static uint64_t splitmix(uint64_t state) {
    uint64_t mixed = state + 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
}

static uint64_t key(uint64_t seed, uint64_t step, uint64_t index, uint64_t stream) {
    return splitmix(splitmix(splitmix(splitmix(seed) ^ step) ^ index) ^ stream);
}

static inline uint32_t mix(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x21f0aaadu;
    word = (word ^ (word >> 15)) * 0x735a2d97u;
    return word ^ (word >> 15);
}

static void randoms(uint64_t words, int64_t start, uint32_t *restrict to, int64_t n) {
    uint32_t first = (uint32_t)words + (uint32_t)start;
    uint32_t second = (uint32_t)(words >> 32);
    for (int64_t i = 0; i < n; i++) to[i] = mix(mix(first + (uint32_t)i) ^ second);
}

#endif
