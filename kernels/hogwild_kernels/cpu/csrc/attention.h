// Attention over blocks: how it is split among threads, and how their results are merged.
//
//   for each task (block read, kv head, chunk of up to 512 tokens), in turns of the threads:
//     attend to the chunk with a running softmax per thread       (attention_vectors.h, _amx.h)
//   for each (query token, head): merge the threads' softmax states
//
// Plain version: for each query token, scores = scale * rotate(q) . k over all visible tokens of all
// blocks, weights = softmax(scores), out = sum of weights * v. hogwild_kernels/reference.py is that.

#pragma once
#include <stdlib.h>
#include "amx.h"

enum { TILE = 64, WIDTH = TILE / LANES, MAX_TILE_ROWS = 96, CHUNK = 512, BLOCK = 32 };

// The running softmax of a thread: one row per (kv head, query token, query head of the group).
typedef struct {
  float *m, *l, *acc;  // running max [T*H], sum [T*H, LANES], weighted values [T*H, D]
} Softmax;

INLINE Softmax softmax_of(const AttentionParams *p, float *workspace, int thread) {
  int64_t rows = (int64_t)p->num_tokens * p->num_heads;
  float *base = workspace + thread * rows * (p->head_dim + LANES + 1);
  return (Softmax){base, base + rows, base + (LANES + 1) * rows};
}

INLINE int64_t softmax_row(const AttentionParams *p, int kv_head, int row, int member) {
  int group = p->num_heads / p->num_kv_heads;
  return ((int64_t)kv_head * p->num_tokens + row) * group + member;
}

typedef struct {
  int kv_head, read, start, stop;
} Task;

static int last_visible(const AttentionParams *p, int read) {
  int length = 0;
  const int32_t *lo = p->lo + p->first_pair[read], *hi = p->hi + p->first_pair[read];
  for (int i = 0; i < p->num_queries[read]; i++)
    if (lo[i] < hi[i] && hi[i] > length) length = hi[i];
  return length;
}

static int first_visible(const AttentionParams *p, int read) {
  int start = INT32_MAX;
  const int32_t *lo = p->lo + p->first_pair[read], *hi = p->hi + p->first_pair[read];
  for (int i = 0; i < p->num_queries[read]; i++)
    if (lo[i] < hi[i] && lo[i] < start) start = lo[i];
  return start;
}

// Return whether a second thread costs more than it saves.
static int is_small(const AttentionParams *p) {
  int64_t scores = 0;
  for (int read = 0; read < p->num_reads; read++)
    scores += (int64_t)last_visible(p, read) * p->num_queries[read];
  return scores * p->num_heads * p->head_dim < 1 << 18;
}

// Return the number of tasks, and write them to tasks unless it is null.
static int list_tasks(const AttentionParams *p, Task *tasks) {
  int count = 0;
  for (int read = 0; read < p->num_reads; read++) {
    int length = last_visible(p, read);
    if (!length) continue;
    for (int start = first_visible(p, read), next; start < length; start = next) {
      next = start / BLOCK * BLOCK + CHUNK;
      for (int head = 0; head < p->num_kv_heads; head++, count++)
        if (tasks) tasks[count] = (Task){head, read, start, next < length ? next : length};
    }
  }
  return count;
}
