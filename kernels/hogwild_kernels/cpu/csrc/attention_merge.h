// Run all tasks of an attention call on the threads, and merge their partial softmaxes.

#pragma once
#include "attention_amx.h"

// Merge the partial softmaxes of a (query token, head), and the sink of the head, into out [D] and lse.
// Maxima are logits times log2(e); lse is natural. Overwrites the partials' maxima.
static void merge(const AttentionParams *p, const Partials *partials, const float *sinks, int row,
                  int head, scalar_t *out, float *lse) {
  int dim = p->head_dim, heads = p->num_heads;
  int count = p->partials_of_row[row + 1] - p->partials_of_row[row];
  int64_t at = (p->partials_of_row[row] - partials->first) * heads + head;
  float *maxima = partials->m + at, *sums = partials->l + at, *acc = partials->acc + at * dim;
  float m = sinks ? sinks[head] * LOG2E : -INFINITY;
  for (int i = 0; i < count; i++) m = maxima[i * heads] > m ? maxima[i * heads] : m;
  float l = sinks ? exp2f(sinks[head] * LOG2E - m) : 0;
  for (int i = 0; i < count; i++) {
    float share = maxima[i * heads] == -INFINITY ? 0 : exp2f(maxima[i * heads] - m);
    l += share ? share * sums[i * heads] : 0;
    maxima[i * heads] = share;
  }
  for (int d = 0; d < dim; d += LANES) {
    f32x16 x = splat(0);
    for (int i = 0; i < count; i++)
      if (maxima[i * heads]) x += maxima[i * heads] / l * load_f32(acc + i * heads * dim + d);
    store(out + d, x);
  }
  *lse = l == 0 ? -INFINITY : m / LOG2E + logf(l);
}

// Attention of q [T, H, D] over the keys and values at page 0, head 0. out [T, H, D], lse [T, H],
// sinks [H] or null, workspace [max_partials, H, D + 2].
EXPORT void block_attention(const AttentionParams *p, const scalar_t *q, const scalar_t *k,
                            const scalar_t *v, const float *sinks, scalar_t *out, float *lse,
                            float *workspace) {
  int heads = p->num_heads, dim = p->head_dim, group = heads / p->num_kv_heads;
  int threads = team_size(is_small(p) ? 1 : p->num_threads);
  int by_tiles = HAS_AMX && HAS_BF16_DOT && p->use_amx;
  int max_rows = (by_tiles ? ROW_GROUPS * LANES : MAX_TILE_ROWS) / group;
  for (int from = 0, to; from < p->num_tokens; from = to) {
    to = slab_stop(p, from, max_rows);
    int count = list_tasks(p, from, to, max_rows, 0);
    Task *tasks = malloc((count + 1) * sizeof(Task));
    list_tasks(p, from, to, max_rows, tasks);
    Partials partials = partials_of(p, workspace, from);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      int team = 1;
#ifdef _OPENMP
      team = omp_get_num_threads();
#endif
      union {
        Buffers plain;
#if HAS_AMX && HAS_BF16_DOT
        TileBuffers tiles;
#endif
      } buffers;
#if HAS_AMX && HAS_BF16_DOT
      if (by_tiles) configure_tiles();
#endif
// A static schedule, so that a thread knows which task it prefetches.
#pragma omp for schedule(static, 1)
      for (int i = 0; i < count; i++) {
#if HAS_AMX && HAS_BF16_DOT
        if (by_tiles) {
          const Task *next = i + team < count ? tasks + i + team : 0;
          run_task_by_tiles(p, q, k, v, tasks + i, next, &partials, &buffers.tiles);
          continue;
        }
#endif
        run_task(p, q, k, v, tasks + i, &partials, &buffers.plain);
      }
#if HAS_AMX && HAS_BF16_DOT
      if (by_tiles) _tile_release();
#endif
#pragma omp for
      for (int64_t i = 0; i < (int64_t)(to - from) * heads; i++) {
        int row = from + i / heads, head = i % heads;
        int64_t at = (int64_t)row * heads + head;
        merge(p, &partials, sinks, row, head, out + at * dim, lse + at);
      }
    }
    free(tasks);
  }
}
