// The largest scores of a row: a heap whose root is the smallest of them.

#pragma once
#include "scalar.h"

enum { FEW_CANDIDATES = 64 };  // ranked first; up to MAX_CANDIDATES if they do not decide

typedef struct {
  int size;
  float score[MAX_CANDIDATES];
  int64_t token[MAX_CANDIDATES];  // token ids of the scores
} Ranking;

// Return whether a ranks below b; of equal scores, the higher token id does.
INLINE int is_worse(const Ranking *best, int a, int b) {
  const float *score = best->score;
  return score[a] < score[b] || (score[a] == score[b] && best->token[a] > best->token[b]);
}

INLINE void swap(Ranking *best, int a, int b) {
  float score = best->score[a];
  int64_t token = best->token[a];
  best->score[a] = best->score[b], best->token[a] = best->token[b];
  best->score[b] = score, best->token[b] = token;
}

static void sift_down(Ranking *best, int size) {
  for (int i = 0;;) {
    int worst = i, left = 2 * i + 1;
    for (int child = left; child < left + 2 && child < size; child++)
      if (is_worse(best, child, worst)) worst = child;
    if (worst == i) return;
    swap(best, i, worst);
    i = worst;
  }
}

static void sift_up(Ranking *best) {
  for (int i = best->size - 1; i && is_worse(best, i, (i - 1) / 2); i = (i - 1) / 2)
    swap(best, i, (i - 1) / 2);
}

// Add a score if it is among the `count` largest so far.
static void heap_push(Ranking *best, int count, float score, int64_t token) {
  if (best->size < count) {
    best->score[best->size] = score, best->token[best->size] = token;
    best->size++;
    sift_up(best);
  } else if (score > best->score[0]) {
    best->score[0] = score, best->token[0] = token;
    sift_down(best, count);
  }
}

// Sort, best first.
static void heap_sort(Ranking *best) {
  for (int last = best->size - 1; last > 0; last--) {
    swap(best, 0, last);
    sift_down(best, last);
  }
}

// Return the rank on which `uniform`, in [0, 1), falls among the tokens that top_k, top_p and min_p
// keep; -1 if more than the ranked ones of `width` tokens are needed to decide. Scores are logits less
// the largest, over the temperature; `total_weight` is the sum of exp(score) over all tokens.
static int sample_ranked(const Ranking *best, float total_weight, int64_t width, float top_k,
                         float top_p, float min_p, float uniform) {
  int limited = top_k > 0 && top_k <= best->size, kept = 0;
  int size = limited ? (int)top_k : best->size;
  if (limited) {
    total_weight = 0;
    for (int i = 0; i < size; i++) total_weight += expf(best->score[i]);
  }
  float total = 0, first = expf(best->score[0]);
  for (; kept < size; kept++) {
    float weight = expf(best->score[kept]);
    if (kept && !(total < top_p * total_weight && weight >= min_p * first)) break;
    total += weight;
  }
  if (!limited && kept == size && size < width) return -1;
  float mass = 0;
  for (int i = 0; i < kept; i++) {
    mass += expf(best->score[i]);
    if (mass > uniform * total) return i;
  }
  return kept - 1;
}
