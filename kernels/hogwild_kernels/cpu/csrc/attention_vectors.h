// Attention of one task with vectors, 64 tokens (a tile) at a time:
//   keys of the tile are transposed, so that a lane is a token: score[row][token] = q . k
//   scores become weights by one step of the running softmax
//   acc[row][dim] = rescale[row] * acc + sum over tokens of weight * value
// A row is a (query token, query head of the group); all rows of a kv head share its keys. Tiles begin
// at multiples of 64 in the block: a row's sums do not depend on what other rows see.

#pragma once
#include "attention.h"

#define PER_WORD (1 + HAS_BF16_DOT)  // scalars that one word_t of a product holds
#if HAS_BF16_DOT
typedef uint32_t word_t;
typedef u32x16 words_t;
#define FMA(acc, w, x) \
  (f32x16) _mm512_dpbf16_ps((__m512)(acc), (__m512bh)_mm512_set1_epi32(w), (__m512bh)(x))
#else
typedef float word_t;
typedef f32x16 words_t;
#define FMA(acc, w, x) ((acc) + (w) * (x))
#endif
#define WORDS_PER_LOAD (64 / (int)sizeof(scalar_t))  // scalars in a vector

static const scalar_t zeros[MAX_HEAD_DIM];

typedef struct {
  word_t query[MAX_TILE_ROWS * MAX_HEAD_DIM / PER_WORD];     // [R, D / PER_WORD]
  words_t keys[MAX_HEAD_DIM / PER_WORD][WIDTH];         // transposed: a lane a token
  words_t values[TILE / PER_WORD][MAX_HEAD_DIM / LANES];
  f32x16 score[MAX_TILE_ROWS][WIDTH];
  word_t weight[MAX_TILE_ROWS][TILE / PER_WORD];
  float rescale[MAX_TILE_ROWS], m[MAX_TILE_ROWS];  // running max
  f32x16 l[MAX_TILE_ROWS];                         // running sum, a part in each lane
  float acc[MAX_TILE_ROWS * MAX_HEAD_DIM];         // [R, D]
} Buffers;

// Store 16 values as words, in order.
INLINE void put_words(word_t *to, f32x16 x) {
#if HAS_BF16_DOT
  store_bf16((uint16_t *)to, x);
#else
  store_f32(to, x);
#endif
}

INLINE void rotate_query(const scalar_t *from, const float *cos, const float *sin, int dim, int i,
                         f32x16 *first, f32x16 *second) {
  f32x16 a = load(from + i), b = load(from + dim / 2 + i);
  f32x16 c = load_f32(cos + i), s = load_f32(sin + i);
  *first = a * c - b * s;
  *second = b * c + a * s;
}

static void load_query(const AttentionParams *p, const scalar_t *q, const Task *task, word_t *to) {
  int dim = p->head_dim, group = p->num_heads / p->num_kv_heads;
  for (int row = task->first; row < task->first + task->count; row++)
    for (int member = 0; member < group; member++, to += dim / PER_WORD) {
      const scalar_t *from = q + (p->first_query[task->read] + row) * p->q_stride +
                           (task->kv_head * group + member) * dim;
      int64_t angle = (int64_t)(p->first_pair[task->read] + row) * (dim / 2);
      for (int i = 0; i < dim / 2; i += LANES) {
        f32x16 a, b;
        rotate_query(from, p->cos + angle, p->sin + angle, dim, i, &a, &b);
        put_words(to + i / PER_WORD, a);
        put_words(to + (dim / 2 + i) / PER_WORD, b);
      }
    }
}

static void load_keys(const scalar_t *const *from, int width, int dim, words_t (*to)[WIDTH]) {
  for (int part = 0; part < width; part++)
    for (int i = 0; i < dim; i += WORDS_PER_LOAD) {
      u32x16 x[LANES];
      UNROLL for (int j = 0; j < LANES; j++) x[j] = *(const u32x16_any *)(from[part * LANES + j] + i);
      transpose(x);
      UNROLL for (int j = 0; j < LANES; j++) {
#if HAS_BF16_DOT
        to[i / 2 + j][part] = x[j];
#else
        if (sizeof(scalar_t) == 4) {
          to[i + j][part] = (f32x16)x[j];
        } else {
          to[i + 2 * j][part] = (f32x16)(x[j] << 16);
          to[i + 2 * j + 1][part] = (f32x16)(x[j] & 0xffff0000);
        }
#endif
      }
    }
}

static void load_values(const scalar_t *const *from, int width, int dim,
                        words_t (*to)[MAX_HEAD_DIM / LANES]) {
  for (int j = 0; j < width * LANES; j += PER_WORD)
#if HAS_BF16_DOT
    for (int i = 0; i < dim; i += 2 * LANES) {
      u16x32 a = *(const u16x32_any *)(from[j] + i), b = *(const u16x32_any *)(from[j + 1] + i);
      to[j / 2][i / LANES] = interleave_low(a, b);
      to[j / 2][i / LANES + 1] = interleave_high(a, b);
    }
#else
    for (int i = 0; i < dim; i += LANES) to[j][i / LANES] = load(from[j] + i);
#endif
}

// Scores of `rows` rows with the tile's first `width` vectors of tokens; both are constants.
INLINE void score_rows(Buffers *b, int row, int rows, int width, int dim) {
  int depth = dim / PER_WORD;
  const word_t *q = b->query + (int64_t)row * depth;
  f32x16 acc[6][WIDTH] = {};
  for (int i = 0; i < depth; i++)
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int part = 0; part < width; part++)
        acc[r][part] = FMA(acc[r][part], q[r * depth + i], b->keys[i][part]);
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int part = 0; part < width; part++) b->score[row + r][part] = acc[r][part];
}

// acc [rows, D] at dims i ... i + 16 * parts: what was there, rescaled, and the tile's values.
INLINE void add_part(const Buffers *b, int row, int rows, int width, int parts, int dim, int i,
                     float *acc) {
  f32x16 out[6][4];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int part = 0; part < parts; part++) {
      float keep = b->rescale[row + r];
      const float *old = acc + (int64_t)(row + r) * dim + i + part * LANES;
      out[r][part] = keep ? keep * load_f32(old) : splat(0);
    }
  for (int j = 0; j < width * LANES / PER_WORD; j++)
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int part = 0; part < parts; part++)
        out[r][part] = FMA(out[r][part], b->weight[row + r][j], b->values[j][i / LANES + part]);
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int part = 0; part < parts; part++)
      store_f32(acc + (int64_t)(row + r) * dim + i + part * LANES, out[r][part]);
}

INLINE void add_rows(const Buffers *b, int row, int rows, int width, int dim, float *acc) {
  int i = 0;
  for (; i + 64 <= dim; i += 64) add_part(b, row, rows, width, 4, dim, i, acc);
  if (i < dim) add_part(b, row, rows, width, 2, dim, i, acc);
}

#define BY_ROWS(function, count, ...)                                    \
  for (int row = 0; row < (count);) {                                    \
    int left = (count) - row;                                            \
    if (left >= 6) { function(b, row, 6, __VA_ARGS__); row += 6; }       \
    else if (left >= 3) { function(b, row, 3, __VA_ARGS__); row += 3; }  \
    else { function(b, row, 1, __VA_ARGS__); row += 1; }                 \
  }

// One step of the running (online) softmax, in units of log2. With new scores x of a query token:
//   m_new = max(m, max x);  l = l * 2^(m - m_new) + sum 2^(x - m_new);  acc likewise, by rescale.
static void weigh(const AttentionParams *p, Buffers *b, const Task *task, int token, int width) {
  int group = p->num_heads / p->num_kv_heads, r = 0;
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const f32x16 never = splat(-INFINITY);
  float scale = p->scale * LOG2E;
  for (int row = task->first; row < task->first + task->count; row++) {
    int lo = p->lo[p->first_pair[task->read] + row];
    int hi = p->hi[p->first_pair[task->read] + row];
    if (lo < task->start) lo = task->start;
    if (hi > task->stop) hi = task->stop;
    int partly = lo > token || hi < token + width * LANES;
    for (int member = 0; member < group; member++, r++) {
      f32x16 x[WIDTH], peak = never;
      for (int part = 0; part < width; part++) {
        x[part] = b->score[r][part] * scale;
        if (p->softcap > 0)
          for (int i = 0; i < LANES; i++)
            x[part][i] = LOG2E * p->softcap * tanhf(x[part][i] / LOG2E / p->softcap);
        if (partly) {
          i32x16 place = lane + (token + part * LANES);
          x[part] = blend((place >= lo) & (place < hi), x[part], never);
        }
        peak = max_of(peak, x[part]);
      }
      float old = b->m[r], now = old;
      b->rescale[r] = old == -INFINITY ? 0 : 1;
      if (any_greater(peak, old)) {
        now = max_lane(peak);
        b->rescale[r] = exp2f(old - now);
        b->m[r] = now;
      }
      float base = now == -INFINITY ? 0 : now;
      f32x16 gained = splat(0);
      for (int part = 0; part < width; part++) {
        f32x16 weight = exp2_approx(x[part] - base);
        gained += weight;
        put_words(b->weight[r] + part * LANES / PER_WORD, weight);
      }
      // Propagate NaN: a row that saw NaN must not look like a row that saw nothing.
      if (now == -INFINITY && isnan(sum_lanes(gained))) b->m[r] = NAN;
      if (b->rescale[r]) gained += b->rescale[r] * b->l[r];
      b->l[r] = gained;
    }
  }
}

// One tile from scores to sums, for `width` vectors of tokens, a constant.
INLINE void run_tile(const AttentionParams *p, Buffers *b, const Task *task, int token, int width,
                     const scalar_t *const *keys, const scalar_t *const *values) {
  int dim = p->head_dim, count = task->count * (p->num_heads / p->num_kv_heads);
  load_keys(keys, width, dim, b->keys);
  BY_ROWS(score_rows, count, width, dim);
  weigh(p, b, task, token, width);
  load_values(values, width, dim, b->values);
  BY_ROWS(add_rows, count, width, dim, b->acc);
}

// Write the partial softmaxes of a task.
static void store_partials(const AttentionParams *p, const Task *task, const Partials *to,
                           const Buffers *b) {
  int dim = p->head_dim, group = p->num_heads / p->num_kv_heads;
  for (int i = 0; i < task->count * group; i++) {
    int64_t at = partial_row(p, to, task, task->first + i / group, i % group);
    if (at < 0) continue;
    to->m[at] = b->m[i];
    to->l[at] = sum_lanes(b->l[i]);
    memcpy(to->acc + at * dim, b->acc + i * dim, dim * sizeof(float));
  }
}

// Attend to one task, of at most MAX_TILE_ROWS rows.
static void run_task(const AttentionParams *p, const scalar_t *q, const scalar_t *k,
                     const scalar_t *v, const Task *task, const Partials *to, Buffers *b) {
  const int32_t *pages = p->pages + (int64_t)task->read * p->max_pages;
  load_query(p, q, task, b->query);
  for (int i = 0; i < task->count * (p->num_heads / p->num_kv_heads); i++)
    b->m[i] = -INFINITY, b->l[i] = splat(0);  // acc: the first tile does not read it
  for (int token = task->start / TILE * TILE; token < task->stop; token += TILE) {
    const scalar_t *keys[TILE], *values[TILE];
    int page = token / p->page_size, offset = token % p->page_size;
    int first = token < task->start ? task->start - token : 0;
    int count = task->stop - token < TILE ? task->stop - token : TILE;
    for (int j = 0; j < TILE; j++) {
      keys[j] = values[j] = zeros;  // what no row sees may hold anything
      if (j >= count) continue;
      int64_t place = pages[page] * p->page_stride + offset * p->slot_stride +
                      task->kv_head * p->head_stride;
      if (j >= first) keys[j] = k + place, values[j] = v + place;
      if (++offset == p->page_size) page++, offset = 0;
    }
#define RUN_TILE(width) run_tile(p, b, task, token, width, keys, values)
    if (count <= LANES) RUN_TILE(1);
    else if (count <= 2 * LANES) RUN_TILE(2);
    else RUN_TILE(WIDTH);
#undef RUN_TILE
  }
  store_partials(p, task, to, b);
}

#undef FMA
#undef BY_ROWS
