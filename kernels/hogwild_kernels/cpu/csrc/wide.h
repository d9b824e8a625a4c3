// Vectors of WIDE 32-bit values, as many as a register of this processor holds: for loops that keep
// many sums in registers. Multiplications and additions are fused explicitly: a compiler may fuse
// `a * b + c` in one copy of a loop and not in another, and the results would differ in the last bit.

#pragma once
#ifdef __AVX__
#include <immintrin.h>
#endif
#include "scalar.h"

#if defined(__AVX512F__)
enum { WIDE = 16 };
#elif defined(__AVX__)
enum { WIDE = 8 };
#else
enum { WIDE = 4 };
#endif
enum { PARTS = LANES / WIDE };  // of a vector of 16 values

typedef float f32_wide __attribute__((vector_size(4 * WIDE)));
typedef int32_t i32_wide __attribute__((vector_size(4 * WIDE)));
typedef uint32_t u32_wide __attribute__((vector_size(4 * WIDE)));
typedef uint32_t u32_wide_any __attribute__((vector_size(4 * WIDE), aligned(2), may_alias));

// a * b + c, rounded once where the processor can.
INLINE f32_wide fma_wide(f32_wide a, f32_wide b, f32_wide c) {
#if defined(__AVX512F__)
  return (f32_wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (f32_wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
  UNROLL for (int i = 0; i < WIDE; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;  // there is nothing to fuse them into
#endif
}

INLINE f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
  f32_wide x[PARTS], y[PARTS], z[PARTS];
  memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
  UNROLL for (int i = 0; i < PARTS; i++) z[i] = fma_wide(x[i], y[i], z[i]);
  memcpy(&c, z, 64);
  return c;
}

// Products of the two int16 values of each word, and their sum, added to acc.
INLINE i32_wide add_int16_products(i32_wide acc, u32_wide a, u32_wide b) {
#if defined(__AVX512BW__)
  return acc + (i32_wide)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return acc + (i32_wide)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return acc + ((i32_wide)(a << 16) >> 16) * ((i32_wide)(b << 16) >> 16) +
         ((i32_wide)a >> 16) * ((i32_wide)b >> 16);
#endif
}

// The even (half 0) or odd bytes of each word as int16, with their sign.
INLINE u32_wide int8_halves(u32_wide w, int half) {
#if defined(__AVX512BW__)
  __m512i x = (__m512i)w;
  return (u32_wide)_mm512_srai_epi16(half ? x : _mm512_slli_epi16(x, 8), 8);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i x = (__m256i)w;
  return (u32_wide)_mm256_srai_epi16(half ? x : _mm256_slli_epi16(x, 8), 8);
#else
  i32_wide high = (i32_wide)(half ? w : w << 8), low = (i32_wide)(half ? w << 16 : w << 24);
  return (u32_wide)((high >> 24) << 16) | ((u32_wide)(low >> 24) & 0xffff);
#endif
}
// The same without sign.
INLINE u32_wide uint8_halves(u32_wide x, int half) { return x >> (half ? 8 : 0) & 0x00ff00ff; }
