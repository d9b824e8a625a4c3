// Attention of bfloat16 where the processor multiplies tiles, 16 x 16 words at once (AMX). Included
// by native_attention.h, whose tasks and running softmax these are.
//
// A tile of scores is [16 tokens, 16 rows]: keys are read as they lie, and a vector holds one
// token's scores with 16 rows, so that the softmax needs no sums across a vector. A task goes part
// by part: what a part needs lies in the nearest cache.

enum { PART = 64, PART_BLOCKS = PART / BLOCK, GROUPS = 4 };
enum { QUERY_STEPS = MAX_DIM / 32, VALUE_TILES = MAX_DIM / 16 };

// A token's score with a row that does not see it: finite, as differences of infinities are not.
#define HIDDEN -1e30f

// 16 rows of a task, counted over its rows and the group's members, and their running softmax.
typedef struct {
  uvec query[QUERY_STEPS][LANES];  // words of dims x rows, times the scale
  float acc[LANES * MAX_DIM];      // [16, D]
  vec most, total;
  ivec lo, hi;               // what each row sees of the task's tokens
  int begin, stop;           // tokens that any of them sees
  int all_begin, all_stop;   // tokens that all of them see
  int count;
  int64_t at;  // of the first row in the state
} RowGroup;

typedef struct {
  RowGroup groups[GROUPS];
  vec score[PART];                                // tokens x rows
  uvec weight[PART_BLOCKS][LANES];                // rows x pairs of tokens
  uvec values[PART_BLOCKS * VALUE_TILES][LANES];  // pairs of tokens x dims
  uvec keys[4][QUERY_STEPS * LANES];              // tokens that do not lie in a row
} TileBuffers;

// What the group's rows see.
static void see(const Job *job, const Task *task, int first, RowGroup *g) {
  int group = job->num_heads / job->num_kv_heads;
  int left = job->counts[task->entry] * group - first;
  g->count = left < LANES ? left : LANES;
  g->begin = g->all_stop = INT32_MAX, g->stop = g->all_begin = 0;
  g->lo = g->hi = (ivec){};
  for (int i = 0; i < g->count; i++) {
    int pair = job->first_pair[task->entry] + (first + i) / group;
    int lo = job->lo[pair] > task->start ? job->lo[pair] : task->start;
    int hi = job->hi[pair] < task->stop ? job->hi[pair] : task->stop;
    g->lo[i] = lo, g->hi[i] = hi;
    g->all_begin = lo > g->all_begin ? lo : g->all_begin;
    g->all_stop = hi < g->all_stop ? hi : g->all_stop;
    if (lo >= hi) continue;
    g->begin = lo < g->begin ? lo : g->begin;
    g->stop = hi > g->stop ? hi : g->stop;
  }
}

static void load_query_tiles(const Job *job, const uint16_t *q, const Task *task, int first,
                             RowGroup *g) {
  int dim = job->dim, group = job->num_heads / job->num_kv_heads;
  float scale = job->scale * (job->softcap > 0 ? 1 : LOG2E);
  uint32_t rows[LANES][MAX_DIM / 2];
  for (int i = 0; i < g->count; i++) {
    int row = (first + i) / group, member = (first + i) % group;
    const uint16_t *from = q + (job->first_row[task->entry] + row) * job->q_stride +
                           (task->kv_head * group + member) * dim;
    int64_t angle = (int64_t)(job->first_pair[task->entry] + row) * (dim / 2);
    for (int d = 0; d < dim / 2; d += LANES) {
      vec x, y;
      rotate_bf16(from, job->cos + angle, job->sin + angle, dim, d, &x, &y);
      store_bf16((uint16_t *)rows[i] + d, x * scale);
      store_bf16((uint16_t *)rows[i] + dim / 2 + d, y * scale);
    }
  }
  for (int step = 0; step < dim / 32; step++) {
    uvec words[LANES];
    for (int i = 0; i < LANES; i++)
      words[i] = *(const uvec_any *)(rows[i < g->count ? i : 0] + step * LANES);
    transpose(words);
    memcpy(g->query[step], words, sizeof(words));
  }
}

static void load_sums(const Job *job, const Task *task, int first, State state, RowGroup *g) {
  int dim = job->dim;
  g->at = state_row(job, task->kv_head, job->first_row[task->entry], 0) + first;
  g->most = splat(-INFINITY), g->total = splat(0);
  memset(g->acc, 0, LANES * dim * sizeof(float));
  for (int i = 0; i < g->count; i++) {
    if (state.most[g->at + i] == -INFINITY) continue;  // nothing was written yet
    g->most[i] = state.most[g->at + i];
    g->total[i] = state.total[(g->at + i) * LANES];
    memcpy(g->acc + i * dim, state.acc + (g->at + i) * dim, dim * sizeof(float));
  }
}

static void store_sums(const Job *job, State state, const RowGroup *g) {
  int dim = job->dim;
  for (int i = 0; i < g->count; i++) {
    float *total = state.total + (g->at + i) * LANES;
    store_f32(total, splat(0));
    total[0] = g->total[i];
    state.most[g->at + i] = isnan(g->total[i]) ? NAN : g->most[i];  // it must not look unseen
  }
  memcpy(state.acc + g->at * dim, g->acc, g->count * dim * sizeof(float));
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

// A task's tokens from `token` on, PART of them at most.
typedef struct {
  const Task *task;
  int token;
} Part;

// Blocks of a part that lie within the task and within a page each: where they begin, -1 for others.
static void find_blocks(const Job *job, const Part *part, int64_t place[PART_BLOCKS]) {
  for (int block = 0; block < PART_BLOCKS; block++) {
    const Task *task = part->task;
    int token = part->token + block * BLOCK;
    int whole = task && job->page_size % BLOCK == 0 && token >= task->start &&
                token + BLOCK <= task->stop;
    place[block] = whole ? place_of(job, task, token) : -1;
  }
}

INLINE void ask_for(const uint16_t *row, int dim) {
  for (int d = 0; d < dim; d += 32) __builtin_prefetch(row + d, 0, 2);
}

// A part's values in pairs; zeros for tokens outside of the task, where anything may lie. Keys and
// values of the next part are asked for on the way, from all its blocks in turn: the processor looks
// ahead in several places at once, in each as far as a page of memory.
static void pair_values(const Job *job, const uint16_t *k, const uint16_t *v, const Part *part,
                        int blocks, const Part *next, TileBuffers *b) {
  static const uint16_t zeros[MAX_DIM];
  const Task *task = part->task;
  int dim = job->dim;
  int64_t step = job->slot_stride, place[PART_BLOCKS], coming[PART_BLOCKS];
  find_blocks(job, part, place);
  find_blocks(job, next, coming);
  for (int pair = 0; pair < LANES; pair++)
    for (int block = 0; block < blocks; block++) {
      const uint16_t *rows[2];
      for (int i = 0, at = part->token + block * BLOCK + 2 * pair; i < 2; i++, at++) {
        if (place[block] >= 0) {
          rows[i] = v + place[block] + (2 * pair + i) * step;
        } else {
          int outside = at < task->start || at >= task->stop;
          rows[i] = outside ? zeros : v + place_of(job, task, at);
        }
        if (coming[block] >= 0) {
          ask_for(k + coming[block] + (2 * pair + i) * step, dim);
          ask_for(v + coming[block] + (2 * pair + i) * step, dim);
        }
      }
      pair_rows(rows[0], rows[1], dim, pair, b->values + block * (dim / LANES));
    }
}

// Where the keys of 16 tokens lie; copied where they lie apart.
INLINE const char *keys_of(const Job *job, const uint16_t *k, const Task *task, int token, int place,
                           TileBuffers *b) {
  if (job->page_size % LANES == 0) return (const char *)(k + place_of(job, task, token));
  uint16_t *to = (uint16_t *)b->keys[place];
  for (int i = 0; i < LANES && token + i < task->stop; i++)
    memcpy(to + i * job->dim, k + place_of(job, task, token + i), job->dim * 2);
  return (const char *)to;
}

// Scores of `parts` times 16 tokens, a constant, with 16 rows. Side by side, since each waits for
// its last product.
INLINE void score_tiles(const Job *job, const uint16_t *k, const Task *task, int token, int parts,
                        const RowGroup *g, vec *score, TileBuffers *b) {
  int64_t stride = (job->page_size % LANES ? job->dim : job->slot_stride) * 2;
  const char *keys[4];
  for (int i = 0; i < parts; i++) keys[i] = keys_of(job, k, task, token + i * LANES, i, b);
  BEFORE_TILES;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int step = 0; step < job->dim / 32; step++) {
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
INLINE vec weight_of(vec x) {
  vec r = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vec p = splat(1.34267015e-2f);
  p = p * r + 5.22424467e-2f;
  p = p * r + 2.41280213e-1f;
  p = p * r + 6.93044841e-1f;
  p = p * r + 1.0f;
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// Scores of tokens from `token` on that some rows do not see, or that are capped.
static void adjust(const Job *job, const RowGroup *g, int token, int count, vec *score) {
  for (int i = 0; i < count; i++, token++) {
    if (job->softcap > 0)
      for (int lane = 0; lane < LANES; lane++)
        score[i][lane] = LOG2E * job->softcap * tanhf(score[i][lane] / job->softcap);
    score[i] = choose((g->lo <= token) & (g->hi > token), score[i], splat(HIDDEN));
  }
}

// Scores of `count` tokens, in units of log2, become weights; what the rows had is rescaled.
static void weigh_tiles(int dim, RowGroup *g, int count, TileBuffers *b) {
  vec peak[4] = {splat(HIDDEN), splat(HIDDEN), splat(HIDDEN), splat(HIDDEN)};
  for (int i = 0; i < count; i += 4)
    UNROLL for (int j = 0; j < 4; j++)
      peak[j] = (vec)_mm512_max_ps((__m512)peak[j], (__m512)b->score[i + j]);
  vec top = larger(larger(peak[0], peak[1]), larger(peak[2], peak[3])), old = g->most;
  g->most = choose((top > HIDDEN / 2) & (top > old), top, old);
  vec base = choose(g->most > -INFINITY, g->most, splat(0));
  vec gained = splat(0);
  for (int block = 0; block * BLOCK < count; block++) {
    uvec words[LANES];
    UNROLL for (int i = 0; i < LANES; i++) {
      vec *pair = b->score + block * BLOCK + 2 * i;
      vec first = weight_of(pair[0] - base), second = weight_of(pair[1] - base);
      gained += first + second;
      words[i] = pair_words(first, second);
    }
    transpose(words);
    memcpy(b->weight[block], words, sizeof(words));
  }
  vec keep = choose(old > -INFINITY, power_of_two(old - g->most), splat(0));
  g->total = keep * g->total + gained;
  if (_mm512_cmp_ps_mask((__m512)keep, _mm512_set1_ps(1), _CMP_NEQ_UQ) == 0) return;
  for (int i = 0; i < g->count; i++)
    for (int d = 0; d < dim; d += LANES)
      store_f32(g->acc + i * dim + d, keep[i] * load_f32(g->acc + i * dim + d));
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
      uvec(*values)[LANES] = b->values + (first_block + block) * tiles + tile;
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

// One step of a group's running softmax: tokens from `token` to `stop`, those that any row sees.
static void attend_part(const Job *job, const uint16_t *k, const Task *task, int token, int stop,
                        RowGroup *g, TileBuffers *b) {
  if (stop > g->stop) stop = g->stop;
  int first_block = g->begin > token ? (g->begin - token) / BLOCK : 0, i = 0;
  token += first_block * BLOCK;
  if (token >= stop) return;
  int blocks = (stop - token + BLOCK - 1) / BLOCK, count = blocks * BLOCK, seen = stop - token;
  for (; i + 3 * LANES < seen; i += 4 * LANES)
    score_tiles(job, k, task, token + i, 4, g, b->score + i, b);
  for (; i < seen; i += LANES) score_tiles(job, k, task, token + i, 1, g, b->score + i, b);
  if (i < count) memset(b->score + i, 0, LANES * sizeof(vec));  // nobody sees these
  if (job->softcap > 0 || token < g->all_begin || token + count > g->all_stop)
    adjust(job, g, token, count, b->score);
  weigh_tiles(job->dim, g, count, b);
  BEFORE_TILES;
  add_values(job->dim, first_block, blocks, g, b);
}

// `next` is the task that the thread takes up afterwards, or none.
static void run_task_by_tiles(const Job *job, const uint16_t *q, const uint16_t *k,
                              const uint16_t *v, const Task *task, const Task *next, State state,
                              TileBuffers *b) {
  int rows = job->counts[task->entry] * (job->num_heads / job->num_kv_heads);
  for (int first = 0; first < rows; first += GROUPS * LANES) {
    int groups = 0, begin = INT32_MAX, stop = 0;
    for (int i = first; i < rows && i < first + GROUPS * LANES; i += LANES) {
      RowGroup *g = b->groups + groups;
      see(job, task, i, g);
      if (g->begin >= g->stop) continue;
      load_query_tiles(job, q, task, i, g);
      load_sums(job, task, i, state, g);
      begin = g->begin < begin ? g->begin : begin;
      stop = g->stop > stop ? g->stop : stop;
      groups++;
    }
    for (int token = begin / BLOCK * BLOCK; token < stop; token += PART) {
      int end = token + PART < stop ? token + PART : stop;
      Part part = {task, token}, after = {task, end};
      if (end == stop) after = (Part){next, next ? next->start / BLOCK * BLOCK : 0};
      pair_values(job, k, v, &part, (end - token + BLOCK - 1) / BLOCK, &after, b);
      for (int i = 0; i < groups; i++) attend_part(job, k, task, token, end, b->groups + i, b);
    }
    for (int i = 0; i < groups; i++) store_sums(job, state, b->groups + i);
  }
}
