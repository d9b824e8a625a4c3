// AMX: tile registers of 16 rows x 64 bytes. One instruction multiplies two of them into a third:
// C[16][16] += A[16][32] * B[32][16] for bfloat16 (64 in place of 32 for int8). A lies as in memory;
// B lies in words: row i holds, for each of 16 columns, the two (four) values of 32-bit word i.

#pragma once
#include "scalar.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

// Return whether the processor has AMX; asks Linux for permission to use it.
EXPORT int has_amx(void) {
#if HAS_AMX
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
  return 0;
#endif
}

#if HAS_AMX
// The tile intrinsics do not tell the compiler that they read memory: finish all writes first.
#define FINISH_WRITES __asm__ volatile("" ::: "memory")

// Give all eight tile registers their full size, 16 rows of 64 bytes.
static void configure_tiles(void) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
  FINISH_WRITES;
  _tile_loadconfig(&shape);
}

// Pack 16 rows of x, from byte 64 * step on, as the second factor of a tile product: transposed.
static void pack_tile(const char *x, int64_t row_bytes, int rows, int64_t row, int64_t step,
                      char *to) {
  u32x16 lanes[LANES] = {};
  for (int r = 0; r < LANES && row + r < rows; r++)
    lanes[r] = *(const u32x16_any *)(x + (row + r) * row_bytes + step * 64);
  transpose(lanes);
  memcpy(to, lanes, sizeof(lanes));
}

// Round two vectors to bfloat16; a word holds one value of each.
INLINE u32x16 pack_bf16_pairs(f32x16 a, f32x16 b) {
  u16x32 x = (u16x32)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  return (u32x16)__builtin_shufflevector(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#endif
