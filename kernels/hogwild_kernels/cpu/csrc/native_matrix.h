// out = x @ weight.T: included by native.c once for each kind of number. NAME(f) is f with its
// suffix; STORED, LOAD and STORE are those of x and out. A word is 4 bytes of a row as it is
// multiplied: one float, two bfloat16 or four bytes. DOT(acc, w, x) multiplies 16 words with 16
// words and adds each word's products to its lane of acc, a SUM. WHOLE: QUANTIZE makes rows of x
// whole numbers first. TILE_DOT, where the processor has tiles, adds 16 x 16 words times 16 x 16
// words to a tile.
//
// The weight lies row by row as the model has it. Several of its rows are read side by side: from
// one place after another, memory gives half of what it can.

INLINE void NAME(finish)(const Matrix *m, const float *scales, SUM sum, int row, int64_t column,
                         STORED *out) {
#if WHOLE
  ivec offset = *(const ivec_any *)(m->offset + column);
  vec y = __builtin_convertvector(sum - offset, vec) * (scales[row] * load_f32(m->scale + column));
#else
  vec y = sum;
#endif
  if (m->bias) y += LOAD((const STORED *)m->bias + column);
  STORE(out + row * m->columns + column, y);
}

// `count` rows of x times 16 / count rows of the weight, both constants: lane r * (16 / count) + c.
INLINE SUM NAME(dots)(const char *const *x, const char *w, int64_t bytes, int count) {
  int columns = LANES / count;
  SUM acc[LANES] = {};
  for (int64_t i = 0; i < bytes; i += 64)
    UNROLL for (int c = 0; c < columns; c++) {
      uvec words = *(const uvec_any *)(w + c * bytes + i);
      __builtin_prefetch(w + (c + columns) * bytes + i);
      UNROLL for (int r = 0; r < count; r++) {
        int at = r * columns + c;
        acc[at] = DOT(acc[at], words, *(const uvec_any *)(x[r] + i));
      }
    }
  uvec lanes[LANES];
  UNROLL for (int i = 0; i < LANES; i++) lanes[i] = (uvec)acc[i];
  transpose(lanes);
  UNROLL for (int i = 1; i < LANES; i++) acc[0] = (i == 1 ? (SUM)lanes[0] : acc[0]) + (SUM)lanes[i];
  return acc[0];
}

// 16 columns of up to `count` rows: y [count], a row of 16 sums each.
INLINE void NAME(take)(const char *x, const char *w, int64_t bytes, int rows, int count, SUM *y) {
  const char *from[4];
  UNROLL for (int r = 0; r < count; r++) from[r] = x + (r < rows ? r : 0) * bytes;
  int size = 64 / count;
  for (int part = 0; part < count; part++) {
    SUM sums = NAME(dots)(from, w + part * (LANES / count) * bytes, bytes, count);
    UNROLL for (int r = 0; r < count; r++)
      memcpy((char *)(y + r) + part * size, (const char *)&sums + r * size, size);
  }
}

static void NAME(columns_by_dots)(const Matrix *m, const char *x, const float *scales, int rows,
                                  int64_t column, STORED *out) {
  const char *w = (const char *)m->weight + column * m->bytes;
  for (int row = 0; row < rows; row += 4) {
    int left = rows - row < 4 ? rows - row : 4;
    const char *from = x + row * m->bytes;
    SUM y[4];
    if (left > 2) NAME(take)(from, w, m->bytes, left, 4, y);
    else if (left == 2) NAME(take)(from, w, m->bytes, 2, 2, y);
    else NAME(take)(from, w, m->bytes, 1, 1, y);
    for (int r = 0; r < left; r++) NAME(finish)(m, scales, y[r], row + r, column, out);
  }
}

#if TILES && defined(TILE_DOT)
// Columns at `column`, one or two tiles of them. x: tiles as lay_tile leaves them.
INLINE void NAME(columns_by_tiles)(const Matrix *m, const char *x, const float *scales, int rows,
                                   int64_t column, int pair, STORED *out) {
  int64_t steps = m->bytes / 64;
  const char *w = (const char *)m->weight + column * m->bytes, *w2 = w + 16 * m->bytes;
  for (int row = 0; row < rows; row += 32) {
    int both = row + 16 < rows;
    const char *from = x + row * m->bytes, *from2 = from + 16 * m->bytes;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < steps; i++) {
      _tile_loadd(4, w + i * 64, m->bytes);
      _tile_loadd(6, from + i * 1024, 64);
      TILE_DOT(0, 4, 6);
      if (pair) { _tile_loadd(5, w2 + i * 64, m->bytes); TILE_DOT(1, 5, 6); }
      if (both) {
        _tile_loadd(7, from2 + i * 1024, 64);
        TILE_DOT(2, 4, 7);
        if (pair) TILE_DOT(3, 5, 7);
      }
    }
    uvec sums[4][LANES];
    _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
    for (int part = 0; part < 4; part++) {
      if ((part & 1 && !pair) || (part & 2 && !both)) continue;
      transpose(sums[part]);
      int first = row + (part & 2 ? 16 : 0);
      for (int r = 0; r < LANES && first + r < rows; r++)
        NAME(finish)(m, scales, (SUM)sums[part][r], first + r, column + (part & 1) * 16, out);
    }
  }
}
#endif

// out [rows, columns] = x [rows, width] @ weight.T, scaled where whole numbers are, + bias.
void NAME(matrix)(const Matrix *m, const STORED *x, int rows, STORED *out, int threads) {
  int64_t chunks = (m->columns + COLUMNS - 1) / COLUMNS;
  const char *words = (const char *)x;
  const float *scales = 0;
#if WHOLE
  float *row_scales = malloc(rows * sizeof(float));
  char *whole = malloc(rows * m->bytes);
  words = whole, scales = row_scales;
#endif
#if TILES && defined(TILE_DOT)
  int tiles = m->tiles && (!WHOLE || rows > DOT_ROWS), row_tiles = (rows + 15) / 16;
  char *laid = tiles ? aligned_alloc(64, row_tiles * 16 * m->bytes) : 0;
#endif
  threads = num_workers(threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#if WHOLE
#pragma omp for
    for (int row = 0; row < rows; row++)
      row_scales[row] = QUANTIZE(x + row * m->bytes, m->factors, (int)m->bytes,
                                       (uint8_t *)whole + row * m->bytes);
#endif
#if TILES && defined(TILE_DOT)
    if (tiles) {
      int64_t steps = m->bytes / 64;
#pragma omp for
      for (int64_t i = 0; i < row_tiles * steps; i++)
        lay_tile(words, m->bytes, rows, i / steps * 16, i % steps, laid + i * 1024);
      BEFORE_TILES;
      configure_tiles();
#pragma omp for schedule(dynamic, 1)
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t column = chunk * COLUMNS, stop = column + COLUMNS;
        stop = stop < m->columns ? stop : m->columns;
        for (; column + 32 <= stop; column += 32)
          NAME(columns_by_tiles)(m, laid, scales, rows, column, 1, out);
        if (column < stop) NAME(columns_by_tiles)(m, laid, scales, rows, column, 0, out);
      }
      _tile_release();
    } else
#endif
    {
#pragma omp for schedule(dynamic, 1)
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t stop = (chunk + 1) * COLUMNS < m->columns ? (chunk + 1) * COLUMNS : m->columns;
        for (int64_t column = chunk * COLUMNS; column < stop; column += LANES)
          NAME(columns_by_dots)(m, words, scales, rows, column, out);
      }
    }
  }
#if WHOLE
  free(row_scales);
  free(whole);
#endif
#if TILES && defined(TILE_DOT)
  free(laid);
#endif
}
