// Logits to tokens, one row a writer: greedy, filtered (top-k, top-p, min-p over the ranked tokens), or
// from the whole row. Plain version: engine/hogwild_engine/step/sampling.py.

#pragma once
#include "attention.h"
#include "ranking.h"

// Load 16 values of a row that has `left` more; -inf beyond its end.
INLINE f32x16 load_part(const scalar_t *x, int64_t left) {
  if (left >= LANES) return load(x);
  const i32x16 places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  scalar_t part[LANES] = {0};
  memcpy(part, x, left * sizeof(scalar_t));
  return blend(places < (int32_t)left, load(part), splat(-INFINITY));
}

// Rank the `count` largest of a row.
static void rank(const scalar_t *x, int64_t width, int count, Ranking *best) {
  best->size = 0;
  for (int64_t i = 0; i < width; i += LANES) {
    f32x16 block = load_part(x + i, width - i);
    if (best->size == count && !any_greater(block, best->score[0])) continue;
    for (int lane = 0; lane < LANES && i + lane < width; lane++)
      heap_push(best, count, block[lane], i + lane);
  }
  heap_sort(best);
}

// Sum exp(x - m) and exp((x - m) * inverse_temperature) over a row.
static void sum_exponentials(const scalar_t *x, int64_t width, float m, float inverse_temperature,
                             float *plain_sum, float *scaled_sum) {
  f32x16 as_is = splat(0), scaled = splat(0);
  for (int64_t i = 0; i < width; i += LANES) {
    f32x16 power = (load_part(x + i, width - i) - m) * LOG2E;
    as_is += exp2_approx(power);
    scaled += exp2_approx(power * inverse_temperature);
  }
  *plain_sum = sum_lanes(as_is), *scaled_sum = sum_lanes(scaled);
}

// exp((x - m) * inverse_temperature) of 16 tokens.
INLINE f32x16 weights(const scalar_t *x, int64_t left, float m, float inverse_temperature) {
  return exp2_approx((load_part(x, left) - m) * LOG2E * inverse_temperature);
}

// Return the token on which `uniform` falls in the cumulative distribution of the whole row.
static int64_t sample_unfiltered(const scalar_t *x, int64_t width, float m, float inverse_temperature, float uniform) {
  double total = 0, mass = 0;
  for (int64_t i = 0; i < width; i += LANES)
    total += sum_lanes(weights(x + i, width - i, m, inverse_temperature));
  int64_t token = 0;
  for (int64_t i = 0; i < width; i += LANES) {
    f32x16 weight = weights(x + i, width - i, m, inverse_temperature);
    float block = sum_lanes(weight);
    if (mass + block <= uniform * total) {
      mass += block;
      continue;
    }
    for (int lane = 0; lane < LANES && mass <= uniform * total; lane++)
      if (weight[lane] > 0) mass += weight[lane], token = i + lane;
    break;
  }
  return token;
}

static int64_t sample_row(const scalar_t *x, int64_t width, const float *settings,
                          float *probability) {
  float temperature = settings[0], top_k = settings[1], top_p = settings[2], min_p = settings[3];
  float uniform = settings[4], inverse_temperature = temperature > 0 ? 1 / temperature : 1, plain_sum, scaled_sum;
  int filters = temperature > 0 && (top_k > 0 || top_p < 1 || min_p > 0);
  int max_ranked = width < MAX_CANDIDATES ? (int)width : MAX_CANDIDATES;
  int count = !filters ? 1 : top_k <= FEW_CANDIDATES ? FEW_CANDIDATES : MAX_CANDIDATES;
  if (count > max_ranked) count = max_ranked;
  Ranking best;
  rank(x, width, count, &best);
  float m = best.score[0];
  sum_exponentials(x, width, m, inverse_temperature, &plain_sum, &scaled_sum);
  int64_t token = best.token[0];
  if (filters && top_k > max_ranked && top_k < width) {
    token = -1;
  } else if (filters) {
    for (;;) {
      for (int i = 0; i < count; i++) best.score[i] = (best.score[i] - m) * inverse_temperature;
      int place = sample_ranked(&best, scaled_sum, width, top_k, top_p, min_p, uniform);
      token = place < 0 ? -1 : best.token[place];
      if (place >= 0 || count == max_ranked) break;
      count = max_ranked;
      rank(x, width, count, &best);
    }
  } else if (temperature > 0) {
    token = sample_unfiltered(x, width, m, inverse_temperature, uniform);
  }
  float score = token < 0 ? 0 : load_part(x + token, width - token)[0];
  *probability = expf(score - m) / plain_sum;
  return token;
}

// Sample one token of each row of logits x [rows, width]. banned[ends[row - 1]] ... banned[ends[row] - 1]
// become -inf in row `row`. settings [rows, 5]: temperature (0: greedy), top_k (0: none), top_p, min_p
// and a uniform number in [0, 1). A token is -1 if MAX_CANDIDATES do not decide. probability: of the
// token at temperature 1 without filters; NaN if the largest logit is not finite.
EXPORT void sample(scalar_t *x, int rows, int64_t width, const int64_t *banned, const int32_t *ends,
                   const float *settings, int64_t *token, float *probability, int threads) {
  scalar_t minus_infinity[LANES];
  store(minus_infinity, splat(-INFINITY));
  threads = team_size(threads < rows ? threads : rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int row = 0; row < rows; row++) {
    scalar_t *at = x + row * width;
    for (int i = row ? ends[row - 1] : 0; i < ends[row]; i++)
      if (banned[i] >= 0 && banned[i] < width) at[banned[i]] = minus_infinity[0];
    token[row] = sample_row(at, width, settings + 5 * row, probability + row);
  }
}
