// Attention over blocks: how it is split among threads, and how the parts are merged.
//
//   for each slab of query tokens (as many as the workspace holds partial softmaxes of)
//     for each task (block read, chunk of 512 tokens, query tokens, kv head), on the threads:
//       a partial softmax of each (query token, head)        (attention_vectors.h, _amx.h)
//     for each (query token, head): merge its partial softmaxes, in the order of its view
//
// Chunks, and the tiles within them, begin at fixed places in their block, and each row is summed in
// the order of its view. So the result of a row is the same bit for bit whatever stands beside it:
// other query tokens, other sessions, more threads.
//
// Plain version: for each query token, scores = scale * rotate(q) . k over all visible tokens of all
// blocks, weights = softmax(scores), out = sum of weights * v. hogwild_kernels/reference.py is that.

#pragma once
#include <stdlib.h>
#include "amx.h"

enum { TILE = 64, WIDTH = TILE / LANES, MAX_TILE_ROWS = 96, BLOCK = 32 };
enum { ROW_GROUPS = 4 };  // of LANES rows: what a task of attention_amx.h takes

// Partial softmaxes of a slab. Row (partial - first) * H + head.
typedef struct {
  float *m, *l, *acc;  // max [P * H], sum [P * H], weighted values [P * H, D]
  int64_t first;       // number of the slab's first partial
} Partials;

INLINE Partials partials_of(const AttentionParams *p, float *workspace, int first_row) {
  int64_t rows = p->max_partials * p->num_heads;
  return (Partials){workspace, workspace + rows, workspace + 2 * rows,
                    p->partials_of_row[first_row]};
}

// Query tokens first ... first + count - 1 of a read, and what any of them sees of one chunk.
typedef struct {
  int kv_head, read, first, count, start, stop;
} Task;

// Return the row of a pair and a head of the group in the partials of a task's chunk; -1 if the pair
// sees nothing there.
INLINE int64_t partial_row(const AttentionParams *p, const Partials *partials, const Task *task,
                           int query, int member) {
  int pair = p->first_pair[task->read] + query, lo = p->lo[pair], hi = p->hi[pair];
  int chunk = task->start / CHUNK, group = p->num_heads / p->num_kv_heads;
  if (lo >= hi || chunk < lo / CHUNK || chunk > (hi - 1) / CHUNK) return -1;
  int64_t partial = p->first_partial[pair] + chunk - lo / CHUNK - partials->first;
  return partial * p->num_heads + task->kv_head * group + member;
}

// What any of some query tokens of a read sees.
static void visible(const AttentionParams *p, int read, int first, int count, int *start, int *stop) {
  const int32_t *lo = p->lo + p->first_pair[read], *hi = p->hi + p->first_pair[read];
  *start = INT32_MAX, *stop = 0;
  for (int i = first; i < first + count; i++) {
    if (lo[i] >= hi[i]) continue;
    *start = lo[i] < *start ? lo[i] : *start;
    *stop = hi[i] > *stop ? hi[i] : *stop;
  }
}

// Return whether a second thread costs more than it saves.
static int is_small(const AttentionParams *p) {
  int64_t scores = 0;
  for (int read = 0; read < p->num_reads; read++) {
    int start, stop;
    visible(p, read, 0, p->num_queries[read], &start, &stop);
    scores += (int64_t)stop * p->num_queries[read];
  }
  return scores * p->num_heads * p->head_dim < 1 << 18;
}

// Return one past the last query token whose partials fit the workspace with those of `first`; whole
// tasks of max_rows, if it is not the last slab.
static int slab_stop(const AttentionParams *p, int first, int max_rows) {
  int stop = first + 1;
  const int32_t *partials = p->partials_of_row;
  while (stop < p->num_tokens && partials[stop + 1] - partials[first] <= p->max_partials) stop++;
  int tasks = (stop - first) / max_rows;
  return stop < p->num_tokens && tasks ? first + tasks * max_rows : stop;
}

// Return the number of tasks of query tokens from ... to - 1, max_rows at most in each, and write
// them to tasks unless it is null.
static int list_tasks(const AttentionParams *p, int from, int to, int max_rows, Task *tasks) {
  int count = 0;
  for (int read = 0; read < p->num_reads; read++) {
    int row = p->first_query[read], start, stop;
    int begin = row > from ? 0 : from - row;
    int end = row + p->num_queries[read] < to ? p->num_queries[read] : to - row;
    if (begin >= end) continue;
    visible(p, read, begin, end - begin, &start, &stop);
    for (int chunk = start / CHUNK * CHUNK; chunk < stop; chunk += CHUNK)
      for (int first = begin; first < end; first += max_rows) {
        Task task = {0, read, first, end - first < max_rows ? end - first : max_rows};
        visible(p, read, first, task.count, &task.start, &task.stop);
        if (task.start < chunk) task.start = chunk;
        if (task.stop > chunk + CHUNK) task.stop = chunk + CHUNK;
        if (task.start >= task.stop) continue;
        for (; task.kv_head < p->num_kv_heads; task.kv_head++, count++)
          if (tasks) tasks[count] = task;
      }
  }
  return count;
}
