// Vectors of 16 values, by the vector extensions of GCC and Clang: load, store and arithmetic. The
// compiler splits them for processors with narrower registers; #ifdef __AVX512F__ has faster forms.

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include "structs.h"

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x16_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x32_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16_any __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t u16x16_any __attribute__((vector_size(32), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define LOG2E 1.44269504f
#define UNROLL _Pragma("GCC unroll 16")

// Load and store

INLINE f32x16 load_f32(const float *p) { return *(const f32x16_any *)p; }
INLINE void store_f32(float *p, f32x16 x) { *(f32x16_any *)p = x; }
INLINE f32x16 load_bf16(const uint16_t *p) {
  return (f32x16)(__builtin_convertvector(*(const u16x16_any *)p, u32x16) << 16);
}
INLINE void store_bf16(uint16_t *p, f32x16 x) {
#ifdef __AVX512BF16__
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  memcpy(p, &rounded, 32);
#else
  u32x16 bits = (u32x16)x;
  u32x16 even = bits + 0x7fff + ((bits >> 16) & 1);
  u32x16 nan = (bits & 0xffff0000) | 0x400000;
  i32x16 is_nan = x != x;
  bits = ((u32x16)is_nan & nan) | (~(u32x16)is_nan & even);
  *(u16x16_any *)p = __builtin_convertvector(bits >> 16, u16x16);
#endif
}

// Arithmetic

INLINE f32x16 splat(float x) { return x - (f32x16){}; }
INLINE f32x16 max_of(f32x16 a, f32x16 b) {
  i32x16 more = a > b;
  return (f32x16)((more & (i32x16)a) | (~more & (i32x16)b));
}
INLINE f32x16 blend(i32x16 mask, f32x16 a, f32x16 b) { return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b)); }
#define FOLD(x, join)                                                                             \
  x = join(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
  x = join(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));      \
  x = join(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));      \
  x = join(x, __builtin_shufflevector(x, x, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0))
INLINE f32x16 plus(f32x16 a, f32x16 b) { return a + b; }
INLINE float sum_lanes(f32x16 x) {
  FOLD(x, plus);
  return x[0];
}
INLINE float max_lane(f32x16 x) {
  FOLD(x, max_of);
  return x[0];
}

// 2^x for x <= 128, relative error under 3e-7; inf at 128, 0 below -150.
INLINE f32x16 exp2_approx(f32x16 x) {
#ifdef __AVX512F__
  x = (f32x16)_mm512_max_ps(_mm512_set1_ps(-200), (__m512)x);  // in this order NaN stays NaN
  f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  i32x16 zero = x < -126.0f;
  x = blend(zero, splat(-126.0f), x);
  f32x16 n = x + 12582912.0f - 12582912.0f;  // rounds to integers
#endif
  f32x16 r = x - n;
  f32x16 p = splat(1.53533619e-4f);
  p = p * r + 1.33988744e-3f;
  p = p * r + 9.61843736e-3f;
  p = p * r + 5.55033247e-2f;
  p = p * r + 2.40226479e-1f;
  p = p * r + 6.93147203e-1f;
  p = p * r + 1.0f;
#ifdef __AVX512F__
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
  return (f32x16)(~zero & (i32x16)(p * (f32x16)power));
#endif
}

// Whether a is max_of than b in any lane.
INLINE int any_greater(f32x16 a, float b) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(b), _CMP_GT_OQ) != 0;
#else
  return max_lane(a) > b;
#endif
}

// Transpose a 16 x 16 matrix of words, in place.
INLINE void transpose(u32x16 x[LANES]) {
  u32x16 y[LANES];
  UNROLL for (int i = 0; i < 16; i += 2) {
    y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12,
                                   28, 14, 30);
    y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27,
                                       13, 29, 15, 31);
  }
  UNROLL for (int i = 0; i < 16; i++) if (!(i & 2)) {
    x[i] = __builtin_shufflevector(y[i], y[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13,
                                   28, 29);
    x[i + 2] = __builtin_shufflevector(y[i], y[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27,
                                       14, 15, 30, 31);
  }
  UNROLL for (int i = 0; i < 16; i++) if (!(i & 4)) {
    y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25,
                                   26, 27);
    y[i + 4] = __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15,
                                       28, 29, 30, 31);
  }
  UNROLL for (int i = 0; i < 8; i++) {
    x[i] = __builtin_shufflevector(y[i], y[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21,
                                   22, 23);
    x[i + 8] = __builtin_shufflevector(y[i], y[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27,
                                       28, 29, 30, 31);
  }
}

// Interleave two rows of 32 bfloat16 values: a word holds one value of each.
INLINE u32x16 interleave_low(u16x32 a, u16x32 b) {
  return (u32x16)__builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
}
INLINE u32x16 interleave_high(u16x32 a, u16x32 b) {
  return (u32x16)__builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54,
                                       23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30,
                                       62, 31, 63);
}
