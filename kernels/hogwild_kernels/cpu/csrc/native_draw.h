// Included by native.c once for each storage type: rows of logits to tokens.

// Sixteen numbers of a row that has `left` more; -inf where it has none.
INLINE vec NAME(load_part)(const STORED *x, int64_t left) {
  if (left >= LANES) return LOAD(x);
  const ivec places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  STORED part[LANES] = {0};
  memcpy(part, x, left * sizeof(STORED));
  return choose(places < (int32_t)left, LOAD(part), splat(-INFINITY));
}

// The `count` largest of a row, in order.
static void NAME(rank)(const STORED *x, int64_t width, int count, Ranking *best) {
  best->size = 0;
  for (int64_t i = 0; i < width; i += LANES) {
    vec block = NAME(load_part)(x + i, width - i);
    if (best->size == count && !exceeds(block, best->score[0])) continue;
    for (int lane = 0; lane < LANES && i + lane < width; lane++)
      take_in(best, count, block[lane], i + lane);
  }
  put_in_order(best);
}

// The sums of exp(x - most) and of exp((x - most) * cooling) over a row.
static void NAME(add_up)(const STORED *x, int64_t width, float most, float cooling, float *plain,
                        float *cooled) {
  vec as_is = splat(0), scaled = splat(0);
  for (int64_t i = 0; i < width; i += LANES) {
    vec power = (NAME(load_part)(x + i, width - i) - most) * LOG2E;
    as_is += power_of_two(power);
    scaled += power_of_two(power * cooling);
  }
  *plain = sum(as_is), *cooled = sum(scaled);
}

// What 16 tokens weigh.
INLINE vec NAME(weights)(const STORED *x, int64_t left, float most, float cooling) {
  return power_of_two((NAME(load_part)(x, left) - most) * LOG2E * cooling);
}

// The token of a row on which a number below 1 falls, in order of place.
static int64_t NAME(walk)(const STORED *x, int64_t width, float most, float cooling, float noise) {
  double total = 0, mass = 0;
  for (int64_t i = 0; i < width; i += LANES)
    total += sum(NAME(weights)(x + i, width - i, most, cooling));
  int64_t token = 0;
  for (int64_t i = 0; i < width; i += LANES) {
    vec weight = NAME(weights)(x + i, width - i, most, cooling);
    float block = sum(weight);
    if (mass + block <= noise * total) {
      mass += block;
      continue;
    }
    for (int lane = 0; lane < LANES && mass <= noise * total; lane++)
      if (weight[lane] > 0) mass += weight[lane], token = i + lane;
    break;
  }
  return token;
}

static int64_t NAME(draw_row)(const STORED *x, int64_t width, const float *settings,
                              float *probability) {
  float temperature = settings[0], top_k = settings[1], top_p = settings[2], min_p = settings[3];
  float noise = settings[4], cooling = temperature > 0 ? 1 / temperature : 1, plain, cooled;
  int filters = temperature > 0 && (top_k > 0 || top_p < 1 || min_p > 0);
  int most_ranked = width < MOST_RANKED ? (int)width : MOST_RANKED;
  int count = !filters ? 1 : top_k <= FEW_RANKED ? FEW_RANKED : MOST_RANKED;
  if (count > most_ranked) count = most_ranked;
  Ranking best;
  NAME(rank)(x, width, count, &best);
  float most = best.score[0];
  NAME(add_up)(x, width, most, cooling, &plain, &cooled);
  int64_t token = best.token[0];
  if (filters && top_k > most_ranked && top_k < width) {
    token = -1;
  } else if (filters) {
    for (;;) {
      for (int i = 0; i < count; i++) best.score[i] = (best.score[i] - most) * cooling;
      int picked = pick(&best, cooled, width, top_k, top_p, min_p, noise);
      token = picked < 0 ? -1 : best.token[picked];
      if (picked >= 0 || count == most_ranked) break;
      count = most_ranked;
      NAME(rank)(x, width, count, &best);
    }
  } else if (temperature > 0) {
    token = NAME(walk)(x, width, most, cooling, noise);
  }
  float score = token < 0 ? 0 : NAME(load_part)(x + token, width - token)[0];
  *probability = expf(score - most) / plain;
  return token;
}

// One token of each row x [rows, width]. Ids banned[ends[row - 1]] ... banned[ends[row] - 1] become
// -inf in row `row`. settings [rows, 5]: temperature (0 for the largest), top_k (0 for none), top_p,
// min_p, a number in 0 ... 1. A token is -1 where more than MOST_RANKED would be needed to tell; its
// probability, at temperature 1 and unfiltered, is NaN where the row's largest is not finite.
void NAME(draw)(STORED *x, int rows, int64_t width, const int64_t *banned, const int32_t *ends,
                const float *settings, int64_t *token, float *probability, int threads) {
  const vec nothing = splat(-INFINITY);
  STORED banned_is[LANES];
  STORE(banned_is, nothing);
  threads = num_workers(threads < rows ? threads : rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int row = 0; row < rows; row++) {
    STORED *at = x + row * width;
    for (int i = row ? ends[row - 1] : 0; i < ends[row]; i++)
      if (banned[i] >= 0 && banned[i] < width) at[banned[i]] = banned_is[0];
    token[row] = NAME(draw_row)(at, width, settings + 5 * row, probability + row);
  }
}
