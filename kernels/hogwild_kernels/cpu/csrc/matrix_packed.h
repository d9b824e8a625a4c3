// One kind of linear layer over a packed weight; matrix_kernel.h includes this file for each kind.
//   KIND(f), SUM, IS_INT8  see matrix_kernel.h
//   WIDE_SUM               a SUM of WIDE lanes
//   STEPS                  1 or 2: products of a word that are added one after another
//   OPERAND(w, step)       words of the weight as the first factor of that step
//   MULTIPLY(acc, w, x)    acc + w * the operand at x for all lanes; x holds STEPS words for each word
//
// A packed weight: word i of 16 columns lies side by side, then word i + 1 of the same columns. So
// column c of a group of 16 is lane c, and words are added one after another:
//
//   for each 64 columns and PACKED_ROWS rows of x, on the threads:
//     for each PACKED_WORDS words:                       (weights stay in the first-level cache)
//       for each 16 to 64 columns, for each 6 rows:      (sums stay in registers)
//         for each word: sum[row][column] += weight[word][column] * x[row][word]
//
// A sum takes its words in this order for any number of rows, columns and threads.

#if STEPS > 1
// The words of a row of x as operands: first all of a word's first, then its second.
INLINE void KIND(expand)(const char *x, int64_t row_bytes, char *out) {
  for (int64_t i = 0; i < row_bytes / 4; i++) {
    uint32_t word = ((const uint32_t *)x)[i], *to = (uint32_t *)out + i * STEPS;
#if IS_INT8
    to[0] = word & 0x00ff00ff, to[1] = word >> 8 & 0x00ff00ff;
#else
    to[0] = word << 16, to[1] = word & 0xffff0000;
#endif
  }
}
#endif

// `count` rows and 16 * `groups` columns, both constants. sums: [count] rows of 64 columns.
INLINE void KIND(packed_tile)(const char *x, int64_t x_stride, const char *w, int64_t group_bytes,
                              int64_t words, int count, int groups, WIDE_SUM *sums) {
  enum { STRIDE = COLUMNS / WIDE };
  int parts = groups * PARTS;
  WIDE_SUM acc[TILE_ROWS][STRIDE];
  UNROLL for (int r = 0; r < count; r++)
    UNROLL for (int p = 0; p < parts; p++) acc[r][p] = sums[r * STRIDE + p];
  for (int64_t i = 0; i < words; i++) {
    UNROLL for (int step = 0; step < STEPS; step++) {
      u32_wide factor[STRIDE];
      UNROLL for (int p = 0; p < parts; p++) {
        const char *at = w + p / PARTS * group_bytes + i * 64 + p % PARTS * sizeof(u32_wide);
        if (!step && p % PARTS == 0) __builtin_prefetch(at + PREFETCH_BYTES, 0, 2);
        factor[p] = OPERAND(*(const u32_wide_any *)at, step);
      }
      UNROLL for (int r = 0; r < count; r++) {
        uint32_t word = *(const uint32_t *)(x + r * x_stride + (i * STEPS + step) * 4);
        u32_wide other = word - (u32_wide){};
        UNROLL for (int p = 0; p < parts; p++) acc[r][p] = MULTIPLY(acc[r][p], factor[p], other);
      }
    }
  }
  UNROLL for (int r = 0; r < count; r++)
    UNROLL for (int p = 0; p < parts; p++) sums[r * STRIDE + p] = acc[r][p];
}

// All columns of a chunk for as many rows as come in full `count`s; `at_once` groups in registers.
INLINE void KIND(packed_sweep)(const char *x, int64_t x_stride, const char *w, int64_t group_bytes,
                               int64_t words, int rows, int count, int groups, int at_once,
                               WIDE_SUM *sums) {
  int group = 0;
  for (; group + at_once <= groups; group += at_once)
    for (int r = 0; r + count <= rows; r += count)
      KIND(packed_tile)(x + r * x_stride, x_stride, w + group * group_bytes, group_bytes, words,
                        count, at_once, sums + r * (COLUMNS / WIDE) + group * PARTS);
  for (; group < groups; group++)
    for (int r = 0; r + count <= rows; r += count)
      KIND(packed_tile)(x + r * x_stride, x_stride, w + group * group_bytes, group_bytes, words,
                        count, 1, sums + r * (COLUMNS / WIDE) + group * PARTS);
}

// Up to COLUMNS columns of up to PACKED_ROWS rows. x holds the rows as operands, x_stride bytes each.
static void KIND(packed_chunk)(const Matrix *m, const char *x, int64_t x_stride, const float *scales,
                               int row, int rows, int64_t column, int groups, scalar_t *out) {
  WIDE_SUM sums[PACKED_ROWS * COLUMNS / WIDE] __attribute__((aligned(64)));
  memset(sums, 0, rows * COLUMNS * sizeof(float));
  int64_t words = m->row_bytes / 4, group_bytes = LANES * m->row_bytes;
  int full = rows / TILE_ROWS * TILE_ROWS;
  for (int64_t first = 0; first < words; first += PACKED_WORDS) {
    int64_t count = words - first < PACKED_WORDS ? words - first : PACKED_WORDS;
    const char *w = (const char *)m->weight + column * m->row_bytes + first * 64;
    const char *from = x + row * x_stride + first * STEPS * 4;
    if (full)
      KIND(packed_sweep)(from, x_stride, w, group_bytes, count, full, TILE_ROWS, groups, GROUPS_6,
                         sums);
    from += full * x_stride;
    WIDE_SUM *rest = sums + full * (COLUMNS / WIDE);
#define SWEEP(n, at_once) \
  case n: KIND(packed_sweep)(from, x_stride, w, group_bytes, count, n, n, groups, at_once, rest); break;
    switch (rows - full) {
      SWEEP(1, GROUPS_1) SWEEP(2, GROUPS_2) SWEEP(3, GROUPS_3) SWEEP(4, GROUPS_4) SWEEP(5, GROUPS_5)
    }
#undef SWEEP
  }
  for (int r = 0; r < rows; r++)
    for (int group = 0; group < groups; group++) {
      SUM sum;
      memcpy(&sum, sums + r * (COLUMNS / WIDE) + group * PARTS, sizeof(sum));
      KIND(finish)(m, scales, sum, row + r, column + group * LANES, out);
    }
}
