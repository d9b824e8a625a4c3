// Included by native.c once for each storage type. NAME(f) is f with its suffix, STORED the type,
// LOAD and STORE move 16 of them, DOTS says whether the processor multiplies pairs of bfloat16.

#define PER_WORD (1 + DOTS)  // numbers in a word that is multiplied at once
#if DOTS
typedef uint32_t NAME(word);
typedef uvec NAME(words);
#define FMA(acc, word, x) \
  (vec) _mm512_dpbf16_ps((__m512)(acc), (__m512bh)_mm512_set1_epi32(word), (__m512bh)(x))
#else
typedef float NAME(word);
typedef vec NAME(words);
#define FMA(acc, word, x) ((acc) + (word) * (x))
#endif
#define WORDS_PER_LOAD (64 / (int)sizeof(STORED))  // numbers in a vector of storage

static const STORED NAME(zeros)[MAX_DIM];

typedef struct {
  NAME(word) query[MAX_ROWS * MAX_DIM / PER_WORD];     // [R, D / PER_WORD]
  NAME(words) keys[MAX_DIM / PER_WORD][WIDTH];         // transposed: a lane a token
  NAME(words) values[TILE / PER_WORD][MAX_DIM / LANES];
  vec score[MAX_ROWS][WIDTH];
  NAME(word) weight[MAX_ROWS][TILE / PER_WORD];
  float rescale[MAX_ROWS];
} NAME(Buffers);

// Sixteen numbers as words, in order.
INLINE void NAME(put_words)(NAME(word) *to, vec x) {
#if DOTS
  store_bf16((uint16_t *)to, x);
#else
  store_f32(to, x);
#endif
}

INLINE void NAME(rotate)(const STORED *from, const float *cos, const float *sin, int dim, int i,
                         vec *first, vec *second) {
  vec a = LOAD(from + i), b = LOAD(from + dim / 2 + i);
  vec c = load_f32(cos + i), s = load_f32(sin + i);
  *first = a * c - b * s;
  *second = b * c + a * s;
}

static void NAME(load_query)(const Job *job, const STORED *q, const Task *task, int first, int rows,
                             NAME(word) * to) {
  int dim = job->dim, group = job->num_heads / job->num_kv_heads;
  for (int row = first; row < first + rows; row++)
    for (int member = 0; member < group; member++, to += dim / PER_WORD) {
      const STORED *from = q + (job->first_row[task->entry] + row) * job->q_stride +
                           (task->kv_head * group + member) * dim;
      int64_t angle = (int64_t)(job->first_pair[task->entry] + row) * (dim / 2);
      for (int i = 0; i < dim / 2; i += LANES) {
        vec a, b;
        NAME(rotate)(from, job->cos + angle, job->sin + angle, dim, i, &a, &b);
        NAME(put_words)(to + i / PER_WORD, a);
        NAME(put_words)(to + (dim / 2 + i) / PER_WORD, b);
      }
    }
}

static void NAME(load_keys)(const STORED *const *from, int width, int dim,
                            NAME(words) (*to)[WIDTH]) {
  for (int part = 0; part < width; part++)
    for (int i = 0; i < dim; i += WORDS_PER_LOAD) {
      uvec x[LANES];
      UNROLL for (int j = 0; j < LANES; j++) x[j] = *(const uvec_any *)(from[part * LANES + j] + i);
      transpose(x);
      UNROLL for (int j = 0; j < LANES; j++) {
#if DOTS
        to[i / 2 + j][part] = x[j];
#else
        if (sizeof(STORED) == 4) {
          to[i + j][part] = (vec)x[j];
        } else {
          to[i + 2 * j][part] = (vec)(x[j] << 16);
          to[i + 2 * j + 1][part] = (vec)(x[j] & 0xffff0000);
        }
#endif
      }
    }
}

static void NAME(load_values)(const STORED *const *from, int width, int dim,
                              NAME(words) (*to)[MAX_DIM / LANES]) {
  for (int j = 0; j < width * LANES; j += PER_WORD)
#if DOTS
    for (int i = 0; i < dim; i += 2 * LANES) {
      wide a = *(const wide_any *)(from[j] + i), b = *(const wide_any *)(from[j + 1] + i);
      to[j / 2][i / LANES] = interleave_low(a, b);
      to[j / 2][i / LANES + 1] = interleave_high(a, b);
    }
#else
    for (int i = 0; i < dim; i += LANES) to[j][i / LANES] = LOAD(from[j] + i);
#endif
}

// Scores of `rows` rows with the tile's first `width` vectors of tokens; both are constants.
INLINE void NAME(score_rows)(NAME(Buffers) * b, int row, int rows, int width, int dim) {
  int depth = dim / PER_WORD;
  const NAME(word) *q = b->query + (int64_t)row * depth;
  vec acc[6][WIDTH] = {};
  for (int i = 0; i < depth; i++)
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int part = 0; part < width; part++)
        acc[r][part] = FMA(acc[r][part], q[r * depth + i], b->keys[i][part]);
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int part = 0; part < width; part++) b->score[row + r][part] = acc[r][part];
}

// acc [rows, D] at dims i ... i + 16 * parts: what was there, rescaled, and the tile's values.
INLINE void NAME(add_part)(const NAME(Buffers) * b, int row, int rows, int width, int parts, int dim,
                           int i, float *acc) {
  vec out[6][4];
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

INLINE void NAME(add_rows)(const NAME(Buffers) * b, int row, int rows, int width, int dim,
                           float *acc) {
  int i = 0;
  for (; i + 64 <= dim; i += 64) NAME(add_part)(b, row, rows, width, 4, dim, i, acc);
  if (i < dim) NAME(add_part)(b, row, rows, width, 2, dim, i, acc);
}

#define BY_ROWS(function, count, ...)                                    \
  for (int row = 0; row < (count);) {                                    \
    int left = (count) - row;                                            \
    if (left >= 6) { function(b, row, 6, __VA_ARGS__); row += 6; }       \
    else if (left >= 3) { function(b, row, 3, __VA_ARGS__); row += 3; }  \
    else { function(b, row, 1, __VA_ARGS__); row += 1; }                 \
  }

// Scores become weights, in units of log2: one step of the running softmax.
static void NAME(weigh)(const Job *job, NAME(Buffers) * b, const Task *task, int first, int rows,
                        int token, int width, State state, int64_t at) {
  int group = job->num_heads / job->num_kv_heads, r = 0;
  const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vec never = splat(-INFINITY);
  float scale = job->scale * LOG2E;
  for (int row = first; row < first + rows; row++) {
    int lo = job->lo[job->first_pair[task->entry] + row];
    int hi = job->hi[job->first_pair[task->entry] + row];
    if (lo < task->start) lo = task->start;
    if (hi > task->stop) hi = task->stop;
    int partly = lo > token || hi < token + width * LANES;
    for (int member = 0; member < group; member++, r++, at++) {
      vec x[WIDTH], peak = never;
      for (int part = 0; part < width; part++) {
        x[part] = b->score[r][part] * scale;
        if (job->softcap > 0)
          for (int i = 0; i < LANES; i++)
            x[part][i] = LOG2E * job->softcap * tanhf(x[part][i] / LOG2E / job->softcap);
        if (partly) {
          ivec place = lane + (token + part * LANES);
          x[part] = choose((place >= lo) & (place < hi), x[part], never);
        }
        peak = larger(peak, x[part]);
      }
      float old = state.most[at], now = old;
      b->rescale[r] = old == -INFINITY ? 0 : 1;
      if (exceeds(peak, old)) {
        now = top(peak);
        b->rescale[r] = exp2f(old - now);
        state.most[at] = now;
      }
      float base = now == -INFINITY ? 0 : now;
      vec gained = splat(0);
      for (int part = 0; part < width; part++) {
        vec weight = power_of_two(x[part] - base);
        gained += weight;
        NAME(put_words)(b->weight[r] + part * LANES / PER_WORD, weight);
      }
      // What is not a number compares with nothing: it must not look like nothing seen.
      if (now == -INFINITY && isnan(sum(gained))) state.most[at] = NAN;
      float *total = state.total + at * LANES;
      if (b->rescale[r]) gained += b->rescale[r] * load_f32(total);
      store_f32(total, gained);
    }
  }
}

// One tile from scores to sums, for `width` vectors of tokens, a constant.
INLINE void NAME(run_tile)(const Job *job, NAME(Buffers) * b, const Task *task, int first, int rows,
                           int token, int width, const STORED *const *keys,
                           const STORED *const *values, State state, int64_t at) {
  int dim = job->dim, count = rows * (job->num_heads / job->num_kv_heads);
  NAME(load_keys)(keys, width, dim, b->keys);
  BY_ROWS(NAME(score_rows), count, width, dim);
  NAME(weigh)(job, b, task, first, rows, token, width, state, at);
  NAME(load_values)(values, width, dim, b->values);
  BY_ROWS(NAME(add_rows), count, width, dim, state.acc + at * dim);
}

static void NAME(run_task)(const Job *job, const STORED *q, const STORED *k, const STORED *v,
                           const Task *task, State state, NAME(Buffers) * b) {
  int group = job->num_heads / job->num_kv_heads, max_rows = MAX_ROWS / group;
  const int32_t *pages = job->pages + (int64_t)task->entry * job->pages_width;
  for (int first = 0; first < job->counts[task->entry]; first += max_rows) {
    int rows = job->counts[task->entry] - first;
    rows = rows < max_rows ? rows : max_rows;
    const int32_t *hi = job->hi + job->first_pair[task->entry] + first, *lo = hi - job->hi + job->lo;
    int last = 0, begin = INT32_MAX;
    for (int i = 0; i < rows; i++) {
      if (lo[i] >= hi[i]) continue;
      last = hi[i] > last ? hi[i] : last;
      begin = lo[i] < begin ? lo[i] : begin;
    }
    int stop = last < task->stop ? last : task->stop;
    int token = begin > task->start ? begin : task->start;
    if (token >= stop) continue;
    NAME(load_query)(job, q, task, first, rows, b->query);
    int64_t at = state_row(job, task->kv_head, job->first_row[task->entry] + first, 0);
    for (; token < stop; token += TILE) {
      const STORED *keys[TILE], *values[TILE];
      int page = token / job->page_size, offset = token % job->page_size;
      int count = stop - token < TILE ? stop - token : TILE;
      for (int j = 0; j < TILE; j++) {
        keys[j] = values[j] = NAME(zeros);
        if (j >= count) continue;
        int64_t place = pages[page] * job->page_stride + offset * job->slot_stride +
                        task->kv_head * job->head_stride;
        keys[j] = k + place;
        values[j] = v + place;
        if (++offset == job->page_size) page++, offset = 0;
      }
#define RUN_TILE(width) \
  NAME(run_tile)(job, b, task, first, rows, token, width, keys, values, state, at)
      if (count <= LANES) RUN_TILE(1);
      else if (count <= 2 * LANES) RUN_TILE(2);
      else RUN_TILE(WIDTH);
#undef RUN_TILE
    }
  }
}

static void NAME(merge)(const Job *job, float *work, int team, const float *sinks, int64_t at,
                        STORED *out, float *lse) {
  int group = job->num_heads / job->num_kv_heads, dim = job->dim;
  int row = at / group % job->num_rows;
  int head = at / group / job->num_rows * group + at % group;
  float most = sinks ? sinks[head] * LOG2E : -INFINITY;
  for (int t = 0; t < team; t++) {
    float seen = state_of(job, work, t).most[at];
    most = seen > most ? seen : most;
  }
  float total = sinks ? exp2f(sinks[head] * LOG2E - most) : 0;
  float share[MAX_THREADS];
  for (int t = 0; t < team; t++) {
    State state = state_of(job, work, t);
    share[t] = state.most[at] == -INFINITY ? 0 : exp2f(state.most[at] - most);
    total += share[t] ? share[t] * sum(load_f32(state.total + at * LANES)) : 0;
  }
  for (int i = 0; i < dim; i += LANES) {
    vec x = splat(0);
    for (int t = 0; t < team; t++)
      if (share[t]) x += share[t] / total * load_f32(state_of(job, work, t).acc + at * dim + i);
    STORE(out + ((int64_t)row * job->num_heads + head) * dim + i, x);
  }
  lse[(int64_t)row * job->num_heads + head] =
      total == 0 ? -INFINITY : most / LOG2E + logf(total);
}

#if TILES && DOTS
#include "native_tiles.h"
#endif

// out [T, H, D], lse [T, H]; work: threads * T * H * (D + 17) floats; k and v at page 0, head 0.
void NAME(block_attention)(const Job *job, const STORED *q, const STORED *k, const STORED *v,
                           const float *sinks, STORED *out, float *lse, float *work) {
  int64_t rows = (int64_t)job->num_rows * job->num_heads;
  int count = list_tasks(job, 0), threads = num_workers(is_small(job) ? 1 : job->threads);
  Task *tasks = malloc((count + 1) * sizeof(Task));
  list_tasks(job, tasks);
#pragma omp parallel num_threads(threads)
  {
    int thread = 0, team = 1;
#ifdef _OPENMP
    thread = omp_get_thread_num();
    team = omp_get_num_threads();
#endif
    State state = state_of(job, work, thread);
    for (int64_t i = 0; i < rows; i++) state.most[i] = -INFINITY;
    union {
      NAME(Buffers) plain;
#if TILES && DOTS
      TileBuffers tiles;
#endif
    } buffers;
#if TILES && DOTS
    if (job->tiles) configure_tiles();
#endif
// In fixed turns: sums depend on who adds what up, and equal calls give equal numbers.
#pragma omp for schedule(static, 1)
    for (int i = 0; i < count; i++) {
#if TILES && DOTS
      if (job->tiles) {
        const Task *next = i + team < count ? tasks + i + team : 0;
        run_task_by_tiles(job, q, k, v, tasks + i, next, state, &buffers.tiles);
        continue;
      }
#endif
      NAME(run_task)(job, q, k, v, tasks + i, state, &buffers.plain);
    }
#if TILES && DOTS
    if (job->tiles) _tile_release();
#endif
#pragma omp for
    for (int64_t i = 0; i < rows; i++) NAME(merge)(job, work, team, sinks, i, out, lse);
  }
  free(tasks);
}

#undef PER_WORD
#undef FMA
#undef WORDS_PER_LOAD
#undef BY_ROWS
