// Linear layers: out [rows, columns] = x [rows, in] @ weight [columns, in].T + bias.
//
//   for each 64 columns, on the threads:
//     AMX: for each 16 or 32 columns and 16 or 32 rows of x: tiles; the weight lies row by row
//     else, the weight packed: see matrix_packed.h
//     else, row by row: for each 16 columns: for 1, 2 or 4 rows of x: dot products
//
// Plain version: out[r][c] = bias[c] + sum over i of x[r][i] * weight[c][i].
//
// Each form is batch invariant: the bits of a row of out depend on that row of x alone, not on the
// number of rows, the row's place or the number of threads. Each adds the products of a sum in an order
// that only the row's width decides, with explicit fused multiplications (wide.h).
//
// Row by row, sixteen rows of the weight are read side by side: memory delivers twice as much to
// several streams as to one. Dot products serve weights that another module reads as the model has
// them (tied embeddings), and few rows of int8 beside AMX tiles.

#pragma once
#include "norms_rope.h"
#include "wide.h"

// A thread takes COLUMNS columns at a time. Up to DOT_ROWS rows of int8 use dot products instead of
// tiles: integer sums are equal either way. Float sums would then depend on the size of the batch.
enum { COLUMNS = 64, DOT_ROWS = 4 };

// See matrix_packed.h. GROUPS_n: groups of 16 columns whose sums for n rows fit in registers.
enum { PACKED_ROWS = 96, TILE_ROWS = 6, PREFETCH_BYTES = 4096 };
#ifdef __AVX512F__
enum { PACKED_WORDS = 128, SUMS_IN_REGISTERS = 16 };
enum { GROUPS_1 = 4, GROUPS_2 = 4, GROUPS_3 = 4, GROUPS_4 = 4, GROUPS_5 = 4, GROUPS_6 = 4 };
#else
enum { PACKED_WORDS = 256, SUMS_IN_REGISTERS = 4 };
enum { GROUPS_1 = 4, GROUPS_2 = 2, GROUPS_3 = 2, GROUPS_4 = 1, GROUPS_5 = 1, GROUPS_6 = 1 };
#endif

INLINE f32_wide add_floats(f32_wide acc, u32_wide w, u32_wide x) {
  return fma_wide((f32_wide)w, (f32_wide)x, acc);
}
#if HAS_BF16_DOT
INLINE f32_wide add_bf16(f32_wide acc, u32_wide w, u32_wide x) {
  return (f32_wide)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
}
#else
INLINE u32_wide bf16_half(u32_wide w, int high) { return high ? w & 0xffff0000 : w << 16; }
INLINE f32_wide add_bf16(f32_wide acc, u32_wide w, u32_wide x) {
  acc = add_floats(acc, bf16_half(w, 0), bf16_half(x, 0));
  return add_floats(acc, bf16_half(w, 1), bf16_half(x, 1));
}
#endif
#ifdef __AVX512VNNI__
INLINE i32_wide add_int8(i32_wide acc, u32_wide w, u32_wide x) {
  return (i32_wide)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w);
}
#else
INLINE i32_wide add_int8(i32_wide acc, u32_wide w, u32_wide x) {
  acc = add_int16_products(acc, int8_halves(w, 0), uint8_halves(x, 0));
  return add_int16_products(acc, int8_halves(w, 1), uint8_halves(x, 1));
}
#endif

#define KIND(name) float_##name
#define IS_INT8 0
#define SUM f32x16
#define WIDE_SUM f32_wide
#ifdef DTYPE_BF16
#define DOT add_bf16
#define TILE_DOT _tile_dpbf16ps
#else
#define DOT add_floats
#endif
#if defined(DTYPE_BF16) && !HAS_BF16_DOT
#define STEPS 2
#define OPERAND bf16_half
#define MULTIPLY add_floats
#else
#define STEPS 1
#define OPERAND(w, step) (w)
#define MULTIPLY DOT
#endif
#include "matrix_kernel.h"
#undef KIND
#undef IS_INT8
#undef SUM
#undef WIDE_SUM
#undef DOT
#undef TILE_DOT
#undef STEPS
#undef OPERAND
#undef MULTIPLY

#define KIND(name) int8_##name
#define IS_INT8 1
#define SUM i32x16
#define WIDE_SUM i32_wide
#define DOT add_int8
#define TILE_DOT _tile_dpbsud
#ifdef __AVX512VNNI__
#define STEPS 1
#define OPERAND(w, step) (w)
#define MULTIPLY DOT
#else
#define STEPS 2
#define OPERAND int8_halves
#define MULTIPLY add_int16_products
#endif
#include "matrix_kernel.h"
#undef KIND
#undef IS_INT8
#undef SUM
#undef WIDE_SUM
#undef DOT
#undef TILE_DOT
#undef STEPS
#undef OPERAND
#undef MULTIPLY
