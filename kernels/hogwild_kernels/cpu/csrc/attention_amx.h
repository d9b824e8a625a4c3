// Attention of one bfloat16 task with AMX tiles, in place of attention_vectors.h.
//
//   for each part of 64 tokens:
//     pair values of the part                                    [32 pairs of tokens][D]
//     for each group of 16 rows (query token, head):
//       score[token][row] = keys (as they lie) x query            tiles of 16 x 16
//       weights by a running softmax: a vector is one token's scores with 16 rows, so no sum runs
//       across the lanes of a vector
//       acc[row][dim] = rescale * acc + weights x values          tiles of 16 x 16
//
// A task runs part by part, since what a part needs fits the nearest caches. Parts begin at multiples of
// 64 in the block, and each row of a tile is summed by itself: a row's sums do not depend on the others.

#pragma once
#include "attention_vectors.h"

#if HAS_AMX && HAS_BF16_DOT

enum { PART = 64, PART_BLOCKS = PART / BLOCK };
enum { QUERY_STEPS = MAX_HEAD_DIM / 32, VALUE_TILES = MAX_HEAD_DIM / 16 };

// The score of a token that a row does not see. Finite: inf - inf would be NaN.
#define HIDDEN -1e30f

// 16 rows of a task, counted over its rows and the group's members, and their running softmax.
typedef struct {
  u32x16 query[QUERY_STEPS][LANES];  // words of dims x rows, times the scale
  float acc[LANES * MAX_HEAD_DIM];      // [16, D]
  f32x16 m, l;   // running max and sum
  i32x16 lo, hi;               // what each row sees of the task's tokens
  int begin, stop;           // tokens that any of them sees
  int all_begin, all_stop;   // tokens that all of them see
  int count;
} RowGroup;

typedef struct {
  RowGroup groups[ROW_GROUPS];
  f32x16 score[PART];                                // tokens x rows
  u32x16 weight[PART_BLOCKS][LANES];                // rows x pairs of tokens
  u32x16 values[PART_BLOCKS * VALUE_TILES][LANES];  // pairs of tokens x dims
  u32x16 keys[4][QUERY_STEPS * LANES];              // tokens that do not lie in a row
} TileBuffers;

// Find what the rows of a group see.
static void find_visible(const AttentionParams *p, const Task *task, int first, RowGroup *g) {
  int group = p->num_heads / p->num_kv_heads;
  int left = task->count * group - first;
  g->count = left < LANES ? left : LANES;
  g->begin = g->all_stop = INT32_MAX, g->stop = g->all_begin = 0;
  g->lo = g->hi = (i32x16){};
  for (int i = 0; i < g->count; i++) {
    int pair = p->first_pair[task->read] + task->first + (first + i) / group;
    int lo = p->lo[pair] > task->start ? p->lo[pair] : task->start;
    int hi = p->hi[pair] < task->stop ? p->hi[pair] : task->stop;
    g->lo[i] = lo, g->hi[i] = hi;
    g->all_begin = lo > g->all_begin ? lo : g->all_begin;
    g->all_stop = hi < g->all_stop ? hi : g->all_stop;
    if (lo >= hi) continue;
    g->begin = lo < g->begin ? lo : g->begin;
    g->stop = hi > g->stop ? hi : g->stop;
  }
}

static void load_query_tiles(const AttentionParams *p, const uint16_t *q, const Task *task,
                             int first, RowGroup *g) {
  int dim = p->head_dim, group = p->num_heads / p->num_kv_heads;
  float scale = p->scale * (p->softcap > 0 ? 1 : LOG2E);
  uint32_t rows[LANES][MAX_HEAD_DIM / 2];
  for (int i = 0; i < g->count; i++) {
    int row = task->first + (first + i) / group, member = (first + i) % group;
    const uint16_t *from = q + (p->first_query[task->read] + row) * p->q_stride +
                           (task->kv_head * group + member) * dim;
    int64_t angle = (int64_t)(p->first_pair[task->read] + row) * (dim / 2);
    for (int d = 0; d < dim / 2; d += LANES) {
      f32x16 x, y;
      rotate_query(from, p->cos + angle, p->sin + angle, dim, d, &x, &y);
      store_bf16((uint16_t *)rows[i] + d, x * scale);
      store_bf16((uint16_t *)rows[i] + dim / 2 + d, y * scale);
    }
  }
  for (int step = 0; step < dim / 32; step++) {
    u32x16 words[LANES];
    for (int i = 0; i < LANES; i++)
      words[i] = *(const u32x16_any *)(rows[i < g->count ? i : 0] + step * LANES);
    transpose(words);
    memcpy(g->query[step], words, sizeof(words));
  }
}

// Write the partial softmaxes of a group, whose first row is row `first` of the task.
static void store_group(const AttentionParams *p, const Task *task, int first, const Partials *to,
                        const RowGroup *g) {
  int dim = p->head_dim, group = p->num_heads / p->num_kv_heads;
  for (int i = 0; i < g->count; i++) {
    int64_t at = partial_row(p, to, task, task->first + (first + i) / group, (first + i) % group);
    if (at < 0) continue;
    to->m[at] = isnan(g->l[i]) ? NAN : g->m[i];  // NaN is not unseen
    to->l[at] = g->l[i];
    memcpy(to->acc + at * dim, g->acc + i * dim, dim * sizeof(float));
  }
}

// Return the place of a token's key and value.
INLINE int64_t place_of(const AttentionParams *p, const Task *task, int token) {
  int page = p->pages[(int64_t)task->read * p->max_pages + token / p->page_size];
  return page * p->page_stride + token % p->page_size * p->slot_stride +
         task->kv_head * p->head_stride;
}

// Values of two tokens, a word of both for each dim; tiles [D / 16][16 pairs].
INLINE void pair_rows(const uint16_t *first, const uint16_t *second, int dim, int pair,
                      u32x16 (*tiles)[LANES]) {
  for (int d = 0; d < dim; d += 32, tiles += 2) {
    u16x32 x = *(const u16x32_any *)(first + d), y = *(const u16x32_any *)(second + d);
    tiles[0][pair] = interleave_low(x, y);
    tiles[1][pair] = interleave_high(x, y);
  }
}

// A task's tokens from `token` on, PART of them at most.
typedef struct {
  const Task *task;
  int token;
} Part;

// Blocks of a part that lie within the task and within a page each: where they begin, -1 for others.
static void find_blocks(const AttentionParams *p, const Part *part, int64_t place[PART_BLOCKS]) {
  for (int block = 0; block < PART_BLOCKS; block++) {
    const Task *task = part->task;
    int token = part->token + block * BLOCK;
    int whole = task && p->page_size % BLOCK == 0 && token >= task->start &&
                token + BLOCK <= task->stop;
    place[block] = whole ? place_of(p, task, token) : -1;
  }
}

INLINE void prefetch_row(const uint16_t *row, int dim) {
  for (int d = 0; d < dim; d += 32) __builtin_prefetch(row + d, 0, 2);
}

// Pair a part's values; tokens outside of the task are zeros, since their memory may hold anything.
// Prefetch keys and values of the next part on the way, from all its blocks in turn: the hardware
// prefetcher follows several streams at once, each within a page of memory.
static void pair_values(const AttentionParams *p, const uint16_t *k, const uint16_t *v,
                        const Part *part, int blocks, const Part *next, TileBuffers *b) {
  static const uint16_t zeros[MAX_HEAD_DIM];
  const Task *task = part->task;
  int dim = p->head_dim;
  int64_t step = p->slot_stride, place[PART_BLOCKS], coming[PART_BLOCKS];
  find_blocks(p, part, place);
  find_blocks(p, next, coming);
  for (int pair = 0; pair < LANES; pair++)
    for (int block = 0; block < blocks; block++) {
      const uint16_t *rows[2];
      for (int i = 0, at = part->token + block * BLOCK + 2 * pair; i < 2; i++, at++) {
        if (place[block] >= 0) {
          rows[i] = v + place[block] + (2 * pair + i) * step;
        } else {
          int outside = at < task->start || at >= task->stop;
          rows[i] = outside ? zeros : v + place_of(p, task, at);
        }
        if (coming[block] >= 0) {
          prefetch_row(k + coming[block] + (2 * pair + i) * step, dim);
          prefetch_row(v + coming[block] + (2 * pair + i) * step, dim);
        }
      }
      pair_rows(rows[0], rows[1], dim, pair, b->values + block * (dim / LANES));
    }
}

// Return the keys of 16 tokens; tokens that are not contiguous are copied.
INLINE const char *keys_of(const AttentionParams *p, const uint16_t *k, const Task *task, int token,
                           int place, TileBuffers *b) {
  if (p->page_size % LANES == 0) return (const char *)(k + place_of(p, task, token));
  uint16_t *to = (uint16_t *)b->keys[place];
  for (int i = 0; i < LANES && token + i < task->stop; i++)
    memcpy(to + i * p->head_dim, k + place_of(p, task, token + i), p->head_dim * 2);
  return (const char *)to;
}

// Scores of `parts` (a constant) times 16 tokens with 16 rows. Several tiles at once, since each
// product waits for the last one into the same tile.
INLINE void score_tiles(const AttentionParams *p, const uint16_t *k, const Task *task, int token,
                        int parts, const RowGroup *g, f32x16 *score, TileBuffers *b) {
  int64_t stride = (p->page_size % LANES ? p->head_dim : p->slot_stride) * 2;
  const char *keys[4];
  for (int i = 0; i < parts; i++) keys[i] = keys_of(p, k, task, token + i * LANES, i, b);
  FINISH_WRITES;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int step = 0; step < p->head_dim / 32; step++) {
    _tile_loadd(6, g->query[step], 64);
#define ADD(part, tile)                                \
  if (part < parts) {                                  \
    _tile_loadd(tile, keys[part] + step * 64, stride); \
    _tile_dpbf16ps(part, tile, 6);                     \
  }
    ADD(0, 4) ADD(1, 5) ADD(2, 4) ADD(3, 5)
#undef ADD
  }
  _tile_stored(0, score, 64);
  if (parts > 1) _tile_stored(1, score + LANES, 64);
  if (parts > 2) _tile_stored(2, score + 2 * LANES, 64);
  if (parts > 3) _tile_stored(3, score + 3 * LANES, 64);
}

// 2^x for x <= 0, relative error under 3e-6: weights are rounded to bfloat16 anyway. NaN stays NaN.
INLINE f32x16 weight_of(f32x16 x) {
  f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  f32x16 p = splat(1.34267015e-2f);
  p = p * r + 5.22424467e-2f;
  p = p * r + 2.41280213e-1f;
  p = p * r + 6.93044841e-1f;
  p = p * r + 1.0f;
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// Apply softcap, and hide tokens that a row does not see.
static void adjust(const AttentionParams *p, const RowGroup *g, int token, int count, f32x16 *score) {
  for (int i = 0; i < count; i++, token++) {
    if (p->softcap > 0)
      for (int lane = 0; lane < LANES; lane++)
        score[i][lane] = LOG2E * p->softcap * tanhf(score[i][lane] / p->softcap);
    score[i] = blend((g->lo <= token) & (g->hi > token), score[i], splat(HIDDEN));
  }
}

// Turn scores of `count` tokens, in units of log2, into weights, and rescale acc.
static void weigh_tiles(int dim, RowGroup *g, int count, TileBuffers *b) {
  f32x16 peak[4] = {splat(HIDDEN), splat(HIDDEN), splat(HIDDEN), splat(HIDDEN)};
  for (int i = 0; i < count; i += 4)
    UNROLL for (int j = 0; j < 4; j++)
      peak[j] = (f32x16)_mm512_max_ps((__m512)peak[j], (__m512)b->score[i + j]);
  f32x16 peaks = max_of(max_of(peak[0], peak[1]), max_of(peak[2], peak[3])), old = g->m;
  g->m = blend((peaks > HIDDEN / 2) & (peaks > old), peaks, old);
  f32x16 base = blend(g->m > -INFINITY, g->m, splat(0));
  f32x16 gained = splat(0);
  for (int block = 0; block * BLOCK < count; block++) {
    u32x16 words[LANES];
    UNROLL for (int i = 0; i < LANES; i++) {
      f32x16 *pair = b->score + block * BLOCK + 2 * i;
      f32x16 first = weight_of(pair[0] - base), second = weight_of(pair[1] - base);
      gained += first + second;
      words[i] = pack_bf16_pairs(first, second);
    }
    transpose(words);
    memcpy(b->weight[block], words, sizeof(words));
  }
  f32x16 rescale = blend(old > -INFINITY, exp2_approx(old - g->m), splat(0));
  g->l = rescale * g->l + gained;
  if (_mm512_cmp_ps_mask((__m512)rescale, _mm512_set1_ps(1), _CMP_NEQ_UQ) == 0) return;
  for (int i = 0; i < g->count; i++)
    for (int d = 0; d < dim; d += LANES)
      store_f32(g->acc + i * dim + d, rescale[i] * load_f32(g->acc + i * dim + d));
}

// acc [16, D] += weights @ values.
static void add_values(int dim, int first_block, int blocks, RowGroup *g, TileBuffers *b) {
  int tiles = dim / LANES, stride = dim * (int)sizeof(float);
  for (int tile = 0; tile < tiles; tile += 4) {
    float *acc = g->acc + tile * LANES;
    int all = tiles - tile >= 4;
    _tile_loadd(0, acc, stride);
    _tile_loadd(1, acc + LANES, stride);
    if (all) {
      _tile_loadd(2, acc + 2 * LANES, stride);
      _tile_loadd(3, acc + 3 * LANES, stride);
    }
    for (int block = 0; block < blocks; block++) {
      u32x16(*values)[LANES] = b->values + (first_block + block) * tiles + tile;
      _tile_loadd(4, b->weight[block], 64);
      _tile_loadd(5, values[0], 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, values[1], 64);
      _tile_dpbf16ps(1, 4, 6);
      if (!all) continue;
      _tile_loadd(5, values[2], 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, values[3], 64);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, acc, stride);
    _tile_stored(1, acc + LANES, stride);
    if (!all) continue;
    _tile_stored(2, acc + 2 * LANES, stride);
    _tile_stored(3, acc + 3 * LANES, stride);
  }
}

// One step of a group's running softmax over the tokens from `token` to `stop` that any row sees.
static void attend_part(const AttentionParams *p, const uint16_t *k, const Task *task, int token,
                        int stop, RowGroup *g, TileBuffers *b) {
  if (stop > g->stop) stop = g->stop;
  int first_block = g->begin > token ? (g->begin - token) / BLOCK : 0, i = 0;
  token += first_block * BLOCK;
  if (token >= stop) return;
  int blocks = (stop - token + BLOCK - 1) / BLOCK, count = blocks * BLOCK, seen = stop - token;
  for (; i + 3 * LANES < seen; i += 4 * LANES)
    score_tiles(p, k, task, token + i, 4, g, b->score + i, b);
  for (; i < seen; i += LANES) score_tiles(p, k, task, token + i, 1, g, b->score + i, b);
  if (i < count) memset(b->score + i, 0, LANES * sizeof(f32x16));  // no query token sees these
  if (p->softcap > 0 || token < g->all_begin || token + count > g->all_stop)
    adjust(p, g, token, count, b->score);
  weigh_tiles(p->head_dim, g, count, b);
  FINISH_WRITES;
  add_values(p->head_dim, first_block, blocks, g, b);
}

// Attend to one task, of at most ROW_GROUPS * LANES rows. `next` is the thread's next task, or null; its
// first part is prefetched.
static void run_task_by_tiles(const AttentionParams *p, const uint16_t *q, const uint16_t *k,
                              const uint16_t *v, const Task *task, const Task *next,
                              const Partials *to, TileBuffers *b) {
  int rows = task->count * (p->num_heads / p->num_kv_heads);
  for (int first = 0; first < rows; first += LANES) {
    RowGroup *g = b->groups + first / LANES;
    find_visible(p, task, first, g);
    if (g->begin >= g->stop) continue;
    load_query_tiles(p, q, task, first, g);
    g->m = splat(-INFINITY), g->l = splat(0);
    memset(g->acc, 0, LANES * p->head_dim * sizeof(float));
  }
  for (int token = task->start / PART * PART, end; token < task->stop; token = end) {
    end = token + PART < task->stop ? token + PART : task->stop;
    Part part = {task, token}, after = {task, end};
    if (end == task->stop) after = (Part){next, next ? next->start / PART * PART : 0};
    pair_values(p, k, v, &part, (end - token + BLOCK - 1) / BLOCK, &after, b);
    for (int first = 0; first < rows; first += LANES)
      attend_part(p, k, task, token, end, b->groups + first / LANES, b);
  }
  for (int first = 0; first < rows; first += LANES)
    if (b->groups[first / LANES].begin < b->groups[first / LANES].stop)
      store_group(p, task, first, to, b->groups + first / LANES);
}

#endif
