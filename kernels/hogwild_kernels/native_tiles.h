// Attention of bfloat16 where the processor multiplies tiles, 16 x 16 words at once (AMX). Included
// by native_attention.h, whose tasks and running softmax these are.
//
// A tile of scores is [16 tokens, 16 rows]: keys are read as they lie, and a vector holds one
// token's scores with 16 rows, so that the softmax needs no sums across a vector.

enum { BLOCKS = CHUNK / BLOCK, QUERY_STEPS = MAX_DIM / 32, VALUE_TILES = MAX_DIM / 16 };

typedef struct {
  uvec query[QUERY_STEPS][LANES];            // words of dims x rows
  vec score[CHUNK];                          // tokens x rows
  uvec weight[BLOCKS][LANES];                // rows x pairs of tokens
  uvec values[BLOCKS][VALUE_TILES][LANES];   // pairs of tokens x dims
  uvec keys[4][QUERY_STEPS * LANES];         // tokens that do not lie in a row
} TileBuffers;

// 16 rows of a task, counted over its rows and the group's members: what they see of its tokens.
typedef struct {
  int count, begin, stop;    // rows; tokens that any of them sees
  int all_begin, all_stop;   // tokens that all of them see
  ivec lo, hi;
} Lanes;

static Lanes lanes_of(const Job *job, const Task *task, int first) {
  int group = job->num_heads / job->num_kv_heads;
  int left = job->counts[task->entry] * group - first;
  Lanes lanes = {.count = left < LANES ? left : LANES, .begin = INT32_MAX, .all_stop = INT32_MAX};
  for (int i = 0; i < lanes.count; i++) {
    int pair = job->first_pair[task->entry] + (first + i) / group;
    int lo = job->lo[pair] > task->start ? job->lo[pair] : task->start;
    int hi = job->hi[pair] < task->stop ? job->hi[pair] : task->stop;
    lanes.lo[i] = lo, lanes.hi[i] = hi;
    lanes.all_begin = lo > lanes.all_begin ? lo : lanes.all_begin;
    lanes.all_stop = hi < lanes.all_stop ? hi : lanes.all_stop;
    if (lo >= hi) continue;
    lanes.begin = lo < lanes.begin ? lo : lanes.begin;
    lanes.stop = hi > lanes.stop ? hi : lanes.stop;
  }
  return lanes;
}

static void query_tile(const Job *job, const uint16_t *q, const Task *task, int first, int count,
                       TileBuffers *b) {
  int dim = job->dim, group = job->num_heads / job->num_kv_heads;
  uint32_t rows[LANES][MAX_DIM / 2];
  for (int i = 0; i < count; i++) {
    int row = (first + i) / group, member = (first + i) % group;
    const uint16_t *from = q + (job->first_row[task->entry] + row) * job->q_stride +
                           (task->kv_head * group + member) * dim;
    int64_t angle = (int64_t)(job->first_pair[task->entry] + row) * (dim / 2);
    for (int d = 0; d < dim / 2; d += LANES) {
      vec x, y;
      rotate_bf16(from, job->cos + angle, job->sin + angle, dim, d, &x, &y);
      store_bf16((uint16_t *)rows[i] + d, x);
      store_bf16((uint16_t *)rows[i] + dim / 2 + d, y);
    }
  }
  for (int step = 0; step < dim / 32; step++) {
    uvec words[LANES];
    for (int i = 0; i < LANES; i++)
      words[i] = *(const uvec_any *)(rows[i < count ? i : 0] + step * LANES);
    transpose(words);
    memcpy(b->query[step], words, sizeof(words));
  }
}

// Where a token's keys and values lie.
INLINE int64_t place_of(const Job *job, const Task *task, int token) {
  int page = job->pages[(int64_t)task->entry * job->pages_width + token / job->page_size];
  return page * job->page_stride + token % job->page_size * job->slot_stride +
         task->kv_head * job->head_stride;
}

// Values of two tokens, a word of both for each dim; tiles [D / 16][16 pairs].
INLINE void pair_rows(const uint16_t *first, const uint16_t *second, int dim, int pair,
                      uvec (*tiles)[LANES]) {
  for (int d = 0; d < dim; d += 32, tiles += 2) {
    wide x = *(const wide_any *)(first + d), y = *(const wide_any *)(second + d);
    tiles[0][pair] = interleave_low(x, y);
    tiles[1][pair] = interleave_high(x, y);
  }
}

INLINE void prefetch_row(const uint16_t *row, int dim) {
  for (int d = 0; d < dim; d += 32) __builtin_prefetch(row + d);
}

// Values of a task's tokens from `from` on, in pairs; zeros for tokens outside of it, where
// anything may lie. Keys of the same tokens and values of the next block are asked for on the way:
// they lie in pieces too short for the processor to see where it goes on.
static void pair_values(const Job *job, const uint16_t *k, const uint16_t *v, const Task *task,
                        int from, TileBuffers *b) {
  static const uint16_t zeros[MAX_DIM];
  for (int block = 0; from + block * BLOCK < task->stop; block++) {
    int token = from + block * BLOCK, next = token + BLOCK;
    if (job->page_size % BLOCK || token < task->start || next > task->stop) {
      for (int pair = 0; pair < LANES; pair++) {
        const uint16_t *rows[2];
        for (int i = 0, at = token + 2 * pair; i < 2; i++, at++)
          rows[i] = at < task->start || at >= task->stop ? zeros : v + place_of(job, task, at);
        pair_rows(rows[0], rows[1], job->dim, pair, b->values[block]);
      }
      continue;
    }
    int64_t step = job->slot_stride, place = place_of(job, task, token);
    const uint16_t *keys = k + place, *values = v + place;
    const uint16_t *after = next < task->stop ? v + place_of(job, task, next) : values;
    for (int pair = 0; pair < LANES; pair++) {
      for (int i = 0; i < 2; i++, keys += step, after += step) {
        prefetch_row(keys, job->dim);
        prefetch_row(after, job->dim);
      }
      pair_rows(values, values + step, job->dim, pair, b->values[block]);
      values += 2 * step;
    }
  }
}

// Where the keys of 16 tokens lie, and bytes between two of them; copied where they lie apart.
INLINE const char *keys_of(const Job *job, const uint16_t *k, const Task *task, int token, int part,
                           TileBuffers *b) {
  if (job->page_size % LANES == 0) return (const char *)(k + place_of(job, task, token));
  uint16_t *to = (uint16_t *)b->keys[part];
  for (int i = 0; i < LANES && token + i < task->stop; i++)
    memcpy(to + i * job->dim, k + place_of(job, task, token + i), job->dim * 2);
  return (const char *)to;
}

// Scores of `parts` times 16 tokens, a constant, with 16 rows. Side by side, since each waits for
// its last product.
INLINE void score_tiles(const Job *job, const uint16_t *k, const Task *task, int token, int parts,
                        vec *score, TileBuffers *b) {
  int64_t stride = (job->page_size % LANES ? job->dim : job->slot_stride) * 2;
  const char *keys[4];
  for (int part = 0; part < parts; part++)
    keys[part] = keys_of(job, k, task, token + part * LANES, part, b);
  BEFORE_TILES;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int step = 0; step < job->dim / 32; step++) {
    _tile_loadd(6, b->query[step], 64);
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

// 2^x for x <= 0, relative error under 4e-6: weights are rounded to bfloat16 anyway. NaN stays NaN.
INLINE vec weight_of(vec x) {
  x = (vec)_mm512_max_ps(_mm512_set1_ps(-200), (__m512)x);
  vec n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT), r = x - n;
  vec p = splat(9.67018131e-3f);
  p = p * r + 5.58288768e-2f;
  p = p * r + 2.40220800e-1f;
  p = p * r + 6.93138301e-1f;
  p = p * r + 1.0f;
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
}

// Scores become weights, in units of log2; gives what the rows had is worth now: keep [16].
static vec weigh_tiles(const Job *job, const Lanes *lanes, int from, int count, State state,
                       int64_t at, TileBuffers *b) {
  float scale = job->scale * LOG2E;
  vec peak = splat(-INFINITY);
  for (int i = 0; i < count; i++) {
    int token = from + i;
    vec x = b->score[i] * scale;
    if (job->softcap > 0)
      for (int lane = 0; lane < LANES; lane++)
        x[lane] = LOG2E * job->softcap * tanhf(x[lane] / LOG2E / job->softcap);
    if (token < lanes->all_begin || token >= lanes->all_stop)
      x = choose((lanes->lo <= token) & (lanes->hi > token), x, splat(-INFINITY));
    b->score[i] = x;  // rounded here: fused with what follows, huge ones would miss their peak
    peak = larger(peak, x);
  }
  vec keep = splat(0), base = splat(0);
  for (int i = 0; i < lanes->count; i++) {
    float old = state.most[at + i], now = peak[i] > old ? peak[i] : old;
    keep[i] = old == -INFINITY ? 0 : exp2f(old - now);
    base[i] = now == -INFINITY ? 0 : now;
    state.most[at + i] = now;
  }
  vec gained = splat(0);
  for (int block = 0; block * BLOCK < count; block++) {
    uvec words[LANES];
    for (int i = 0; i < LANES; i++) {
      vec *pair = b->score + block * BLOCK + 2 * i;
      vec first = weight_of(pair[0] - base), second = weight_of(pair[1] - base);
      gained += first + second;
      words[i] = pair_words(first, second);
    }
    transpose(words);
    memcpy(b->weight[block], words, sizeof(words));
  }
  for (int i = 0; i < lanes->count; i++) {
    float *total = state.total + (at + i) * LANES;
    if (!keep[i]) store_f32(total, splat(0));
    total[0] = keep[i] * total[0] + gained[i];
  }
  return keep;
}

// acc [16, D] = keep * acc + weights @ values, at dims 16 * tile and on, one to four tiles of them.
static void add_values(int dim, int tile, int blocks_from, int blocks_to, int count, vec keep,
                       float *acc, TileBuffers *b) {
  int tiles = dim / LANES - tile;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int block = blocks_from; block < blocks_to; block++) {
    uvec(*values)[LANES] = b->values[block] + tile;
    _tile_loadd(4, b->weight[block - blocks_from], 64);
    _tile_loadd(5, values[0], 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, values[1], 64);
    _tile_dpbf16ps(1, 4, 6);
    if (tiles < 4) continue;
    _tile_loadd(5, values[2], 64);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(6, values[3], 64);
    _tile_dpbf16ps(3, 4, 6);
  }
  vec sums[4][LANES];
  _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
  for (int i = 0; i < count; i++)
    for (int part = 0; part < 4 && part < tiles; part++) {
      float *to = acc + i * dim + (tile + part) * LANES;
      store_f32(to, keep[i] ? keep[i] * load_f32(to) + sums[part][i] : sums[part][i]);
    }
}

static void run_task_by_tiles(const Job *job, const uint16_t *q, const uint16_t *k,
                              const uint16_t *v, const Task *task, State state, TileBuffers *b) {
  int group = job->num_heads / job->num_kv_heads, rows = job->counts[task->entry] * group;
  int base = task->start / BLOCK * BLOCK;
  pair_values(job, k, v, task, base, b);
  for (int first = 0; first < rows; first += LANES) {
    Lanes lanes = lanes_of(job, task, first);
    if (lanes.begin >= lanes.stop) continue;
    query_tile(job, q, task, first, lanes.count, b);
    BEFORE_TILES;
    int from = (lanes.begin - base) / BLOCK, to = (lanes.stop - base + BLOCK - 1) / BLOCK;
    int token = base + from * BLOCK, tokens = (to - from) * BLOCK;
    int seen = task->stop - token < tokens ? task->stop - token : tokens, i = 0;
    for (; i + 3 * LANES < seen; i += 4 * LANES)
      score_tiles(job, k, task, token + i, 4, b->score + i, b);
    for (; i < seen; i += LANES) score_tiles(job, k, task, token + i, 1, b->score + i, b);
    if (i < tokens) memset(b->score + i, 0, LANES * sizeof(vec));  // nobody sees these
    int64_t at = state_row(job, task->kv_head, job->first_row[task->entry], 0) + first;
    vec keep = weigh_tiles(job, &lanes, token, tokens, state, at, b);
    BEFORE_TILES;
    for (int tile = 0; tile < job->dim / LANES; tile += 4)
      add_values(job->dim, tile, from, to, lanes.count, keep, state.acc + at * job->dim, b);
  }
}
