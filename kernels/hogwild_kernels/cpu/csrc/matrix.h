// Linear layers: out [rows, columns] = x [rows, in] @ weight [columns, in].T + bias.
//
//   for each 64 columns, on the threads:
//     for each 16 columns: for 1, 2 or 4 rows of x: dot products          (any processor)
//     or for each 16 or 32 columns and 16 or 32 rows of x: AMX tiles
//
// Plain version: out[r][c] = bias[c] + sum over i of x[r][i] * weight[c][i]. The weight lies row by row
// as the model has it, without a packed copy. Sixteen of its rows are read side by side: memory
// delivers twice as much to several streams as to one.

#pragma once
#include "norms_rope.h"

// A thread takes COLUMNS columns at a time. Up to DOT_ROWS rows of int8 use dot products instead of
// tiles: integer sums are equal either way. Float sums would then depend on the size of the batch.
enum { COLUMNS = 64, DOT_ROWS = 4 };

// Return whether these matrices are fast: a vector of 16 values is one register.
EXPORT int has_avx512(void) {
#ifdef __AVX512F__
  return 1;
#else
  return 0;
#endif
}

#define DOT_FLOATS(acc, w, x) ((acc) + (f32x16)(w) * (f32x16)(x))
#ifdef __AVX512BF16__
#define DOT_BF16(acc, w, x) \
  (f32x16) _mm512_dpbf16_ps((__m512)(acc), (__m512bh)(w), (__m512bh)(x))
#else
#define DOT_BF16(acc, w, x)                                \
  ((acc) + (f32x16)((w) << 16) * (f32x16)((x) << 16) +           \
   (f32x16)((w) & 0xffff0000) * (f32x16)((x) & 0xffff0000))
#endif
#ifdef __AVX512VNNI__
#define DOT_INT8(acc, w, x) (i32x16) _mm512_dpbusd_epi32((__m512i)(acc), (__m512i)(x), (__m512i)(w))
#else
INLINE i32x16 dot_int8(i32x16 acc, u32x16 w, u32x16 x) {
  for (int i = 0; i < 32; i += 8)
    acc += ((i32x16)(w << (24 - i)) >> 24) * (i32x16)((x >> i) & 255);
  return acc;
}
#define DOT_INT8 dot_int8
#endif

#define KIND(name) float_##name
#define IS_INT8 0
#define SUM f32x16
#ifdef DTYPE_BF16
#define DOT DOT_BF16
#define TILE_DOT _tile_dpbf16ps
#else
#define DOT DOT_FLOATS
#endif
#include "matrix_kernel.h"
#undef KIND
#undef IS_INT8
#undef SUM
#undef DOT
#undef TILE_DOT

#define KIND(name) int8_##name
#define IS_INT8 1
#define SUM i32x16
#define DOT DOT_INT8
#define TILE_DOT _tile_dpbsud
#include "matrix_kernel.h"
#undef KIND
#undef IS_INT8
#undef SUM
#undef DOT
#undef TILE_DOT
