// One kind of linear layer; matrix.h includes this file once for floats and once for int8.
//   KIND(f)      f with the kind's prefix
//   SUM, DOT     DOT(acc, w, x) multiplies WIDE words of w and x, adds each word's products to its lane
//                of acc. A word is 32 bits of a row: one float, two bfloat16, four int8. A SUM has 16
//                lanes, a WIDE_SUM WIDE
//   TILE_DOT     the same for AMX tiles, if the processor has them
//   IS_INT8      quantize rows of x first, scale the sums
//   STEPS, OPERAND, MULTIPLY  see matrix_packed.h

INLINE void KIND(finish)(const Matrix *m, const float *scales, SUM sum, int row, int64_t column,
                 scalar_t *out) {
#if IS_INT8
  i32x16 zero = *(const i32x16_any *)(m->zero_point + column);
  f32x16 y = __builtin_convertvector(sum - zero, f32x16);
  f32x16 scale = scales[row] * load_f32(m->scale + column);
  if (m->bias) y = fma16(y, scale, load((const scalar_t *)m->bias + column));
  else y *= scale;
#else
  f32x16 y = sum;
  if (m->bias) y += load((const scalar_t *)m->bias + column);
#endif
  store(out + row * m->columns + column, y);
}

#include "matrix_packed.h"

// `count` rows of x times 16 / count rows of the weight, both constants: lane r * (16 / count) + c.
INLINE SUM KIND(dots)(const char *const *x, const char *w, int64_t row_bytes, int count) {
  int columns = LANES / count;
  int at_once = SUMS_IN_REGISTERS > count ? SUMS_IN_REGISTERS / count : 1;  // columns
  u32x16 lanes[LANES];
  for (int first = 0; first < columns; first += at_once) {
    WIDE_SUM acc[SUMS_IN_REGISTERS][PARTS] = {};
    for (int64_t i = 0; i < row_bytes; i += 64)
      UNROLL for (int c = 0; c < at_once; c++) {
        const char *from = w + (first + c) * row_bytes + i;
        __builtin_prefetch(from + at_once * row_bytes);
        UNROLL for (int part = 0; part < PARTS; part++) {
          int64_t byte = part * sizeof(u32_wide);
          u32_wide words = *(const u32_wide_any *)(from + byte);
          UNROLL for (int r = 0; r < count; r++)
            acc[r * at_once + c][part] = DOT(acc[r * at_once + c][part], words,
                                             *(const u32_wide_any *)(x[r] + i + byte));
        }
      }
    UNROLL for (int r = 0; r < count; r++)
      UNROLL for (int c = 0; c < at_once; c++)
        memcpy(lanes + r * columns + first + c, acc[r * at_once + c], 64);
  }
  transpose(lanes);
  SUM sum = (SUM)lanes[0];
  UNROLL for (int i = 1; i < LANES; i++) sum += (SUM)lanes[i];
  return sum;
}

// 16 columns of up to `count` rows: y [count], a row of 16 sums each.
INLINE void KIND(take)(const char *x, const char *w, int64_t row_bytes, int rows, int count, SUM *y) {
  const char *from[4];
  UNROLL for (int r = 0; r < count; r++) from[r] = x + (r < rows ? r : 0) * row_bytes;
  int size = 64 / count;
  for (int part = 0; part < count; part++) {
    SUM sums = KIND(dots)(from, w + part * (LANES / count) * row_bytes, row_bytes, count);
    UNROLL for (int r = 0; r < count; r++)
      memcpy((char *)(y + r) + part * size, (const char *)&sums + r * size, size);
  }
}

static void KIND(columns_by_dots)(const Matrix *m, const char *x, const float *scales, int rows,
                 int64_t column, scalar_t *out) {
  const char *w = (const char *)m->weight + column * m->row_bytes;
  for (int row = 0; row < rows; row += 4) {
    int left = rows - row < 4 ? rows - row : 4;
    const char *from = x + row * m->row_bytes;
    SUM y[4];
    if (left > 2) KIND(take)(from, w, m->row_bytes, left, 4, y);
    else if (left == 2) KIND(take)(from, w, m->row_bytes, 2, 2, y);
    else KIND(take)(from, w, m->row_bytes, 1, 1, y);
    for (int r = 0; r < left; r++) KIND(finish)(m, scales, y[r], row + r, column, out);
  }
}

#if HAS_AMX && defined(TILE_DOT)
// 16 or, as a pair, 32 columns with AMX tiles. x: tiles from pack_tile.
INLINE void KIND(columns_by_tiles)(const Matrix *m, const char *x, const float *scales, int rows,
                 int64_t column, int pair, scalar_t *out) {
  int64_t steps = m->row_bytes / 64;
  const char *w = (const char *)m->weight + column * m->row_bytes, *w2 = w + 16 * m->row_bytes;
  for (int row = 0; row < rows; row += 32) {
    int both = row + 16 < rows;
    const char *from = x + row * m->row_bytes, *from2 = from + 16 * m->row_bytes;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < steps; i++) {
      _tile_loadd(4, w + i * 64, m->row_bytes);
      _tile_loadd(6, from + i * 1024, 64);
      TILE_DOT(0, 4, 6);
      if (pair) { _tile_loadd(5, w2 + i * 64, m->row_bytes); TILE_DOT(1, 5, 6); }
      if (both) {
        _tile_loadd(7, from2 + i * 1024, 64);
        TILE_DOT(2, 4, 7);
        if (pair) TILE_DOT(3, 5, 7);
      }
    }
    u32x16 sums[4][LANES];
    _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
    for (int part = 0; part < 4; part++) {
      if ((part & 1 && !pair) || (part & 2 && !both)) continue;
      transpose(sums[part]);
      int first = row + (part & 2 ? 16 : 0);
      for (int r = 0; r < LANES && first + r < rows; r++)
        KIND(finish)(m, scales, (SUM)sums[part][r], first + r, column + (part & 1) * 16, out);
    }
  }
}
#endif

// out [rows, columns] = x [rows, in] @ weight.T + bias.
EXPORT void KIND(matrix)(const Matrix *m, const scalar_t *x, int rows, scalar_t *out, int threads) {
  int64_t chunks = (m->columns + COLUMNS - 1) / COLUMNS;
  int64_t row_blocks = (rows + PACKED_ROWS - 1) / PACKED_ROWS;
  const char *words = (const char *)x;
  const float *scales = 0;
#if IS_INT8
  float *row_scales = malloc(rows * sizeof(float));
  char *quantized = malloc(rows * m->row_bytes);
  words = quantized, scales = row_scales;
#endif
#if HAS_AMX && defined(TILE_DOT)
  int tiles = m->use_amx && (!IS_INT8 || rows > DOT_ROWS), row_tiles = (rows + 15) / 16;
  char *packed = tiles ? aligned_alloc(64, row_tiles * 16 * m->row_bytes) : 0;
#endif
#if STEPS > 1
  char *operands = m->is_packed ? aligned_alloc(64, rows * STEPS * m->row_bytes) : 0;
#else
  const char *operands = words;
#endif
  threads = team_size(threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#if IS_INT8
#pragma omp for
    for (int row = 0; row < rows; row++)
      row_scales[row] = quantize(x + row * m->row_bytes, m->input_scale, (int)m->row_bytes,
                                       (uint8_t *)quantized + row * m->row_bytes);
#endif
#if HAS_AMX && defined(TILE_DOT)
    if (tiles) {
      int64_t steps = m->row_bytes / 64;
#pragma omp for
      for (int64_t i = 0; i < row_tiles * steps; i++)
        pack_tile(words, m->row_bytes, rows, i / steps * 16, i % steps, packed + i * 1024);
      FINISH_WRITES;
      configure_tiles();
#pragma omp for schedule(dynamic, 1)
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t column = chunk * COLUMNS, stop = column + COLUMNS;
        stop = stop < m->columns ? stop : m->columns;
        for (; column + 32 <= stop; column += 32)
          KIND(columns_by_tiles)(m, packed, scales, rows, column, 1, out);
        if (column < stop) KIND(columns_by_tiles)(m, packed, scales, rows, column, 0, out);
      }
      _tile_release();
    } else
#endif
    if (m->is_packed) {
#if STEPS > 1
#pragma omp for
      for (int row = 0; row < rows; row++)
        KIND(expand)(words + row * m->row_bytes, m->row_bytes,
                     operands + row * STEPS * m->row_bytes);
#endif
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < chunks * row_blocks; task++) {
        int64_t column = task / row_blocks * COLUMNS;
        int row = task % row_blocks * PACKED_ROWS;
        int64_t left = m->columns - column;
        KIND(packed_chunk)(m, operands, STEPS * m->row_bytes, scales, row,
                           rows - row < PACKED_ROWS ? rows - row : PACKED_ROWS, column,
                           (int)(left < COLUMNS ? left : COLUMNS) / LANES, out);
      }
    } else {
#pragma omp for schedule(dynamic, 1)
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t stop = (chunk + 1) * COLUMNS < m->columns ? (chunk + 1) * COLUMNS : m->columns;
        for (int64_t column = chunk * COLUMNS; column < stop; column += LANES)
          KIND(columns_by_dots)(m, words, scales, rows, column, out);
      }
    }
  }
#if IS_INT8
  free(row_scales);
  free(quantized);
#endif
#if HAS_AMX && defined(TILE_DOT)
  free(packed);
#endif
#if STEPS > 1
  free(operands);
#endif
}
