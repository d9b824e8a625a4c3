// Run all tasks of an attention call on the threads, and merge their softmax states.

#pragma once
#include "attention_amx.h"

// Merge the threads' softmax states of one row, and the sink of its head, into out and lse.
// at is the row's index in [KH, T, group]. Maxima are logits times log2(e); lse is natural.
static void merge(const AttentionParams *p, float *workspace, int team, const float *sinks,
                  int64_t at, scalar_t *out, float *lse) {
  int group = p->num_heads / p->num_kv_heads, dim = p->head_dim;
  int row = at / group % p->num_tokens;
  int head = at / group / p->num_tokens * group + at % group;
  float m = sinks ? sinks[head] * LOG2E : -INFINITY;
  for (int t = 0; t < team; t++) {
    float seen = softmax_of(p, workspace, t).m[at];
    m = seen > m ? seen : m;
  }
  float l = sinks ? exp2f(sinks[head] * LOG2E - m) : 0;
  float share[MAX_THREADS];
  for (int t = 0; t < team; t++) {
    Softmax softmax = softmax_of(p, workspace, t);
    share[t] = softmax.m[at] == -INFINITY ? 0 : exp2f(softmax.m[at] - m);
    l += share[t] ? share[t] * sum_lanes(load_f32(softmax.l + at * LANES)) : 0;
  }
  for (int i = 0; i < dim; i += LANES) {
    f32x16 x = splat(0);
    for (int t = 0; t < team; t++)
      if (share[t]) x += share[t] / l * load_f32(softmax_of(p, workspace, t).acc + at * dim + i);
    store(out + ((int64_t)row * p->num_heads + head) * dim + i, x);
  }
  lse[(int64_t)row * p->num_heads + head] =
      l == 0 ? -INFINITY : m / LOG2E + logf(l);
}

// Attention of q [T, H, D] over the keys and values at page 0, head 0. out [T, H, D], lse [T, H],
// sinks [H] or null, workspace [num_threads, T, H, D + LANES + 1].
EXPORT void block_attention(const AttentionParams *p, const scalar_t *q, const scalar_t *k,
                            const scalar_t *v, const float *sinks, scalar_t *out, float *lse,
                            float *workspace) {
  int64_t rows = (int64_t)p->num_tokens * p->num_heads;
  int count = list_tasks(p, 0), threads = team_size(is_small(p) ? 1 : p->num_threads);
  Task *tasks = malloc((count + 1) * sizeof(Task));
  list_tasks(p, tasks);
#pragma omp parallel num_threads(threads)
  {
    int thread = 0, team = 1;
#ifdef _OPENMP
    thread = omp_get_thread_num();
    team = omp_get_num_threads();
#endif
    Softmax softmax = softmax_of(p, workspace, thread);
    for (int64_t i = 0; i < rows; i++) softmax.m[i] = -INFINITY;
    union {
      Buffers plain;
#if HAS_AMX && HAS_BF16_DOT
      TileBuffers tiles;
#endif
    } buffers;
#if HAS_AMX && HAS_BF16_DOT
    if (p->use_amx) configure_tiles();
#endif
// A static schedule: the order of the sums depends on it, and equal calls give equal results.
#pragma omp for schedule(static, 1)
    for (int i = 0; i < count; i++) {
#if HAS_AMX && HAS_BF16_DOT
      if (p->use_amx) {
        const Task *next = i + team < count ? tasks + i + team : 0;
        run_task_by_tiles(p, q, k, v, tasks + i, next, softmax, &buffers.tiles);
        continue;
      }
#endif
      run_task(p, q, k, v, tasks + i, softmax, &buffers.plain);
    }
#if HAS_AMX && HAS_BF16_DOT
    if (p->use_amx) _tile_release();
#endif
#pragma omp for
    for (int64_t i = 0; i < rows; i++) merge(p, workspace, team, sinks, i, out, lse);
  }
  free(tasks);
}
