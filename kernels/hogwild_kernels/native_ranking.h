// Sampling: the most probable tokens of rows of logits, and which of them is drawn.

// Ranking of a row of logits: a heap whose root is the worst of the best.

INLINE int is_worse(float a, int64_t at_a, float b, int64_t at_b) {
  return a < b || (a == b && at_a > at_b);
}

static void sink(float *score, int64_t *token, int size) {
  for (int i = 0;;) {
    int worst = i, left = 2 * i + 1;
    for (int child = left; child < left + 2 && child < size; child++)
      if (is_worse(score[child], token[child], score[worst], token[worst])) worst = child;
    if (worst == i) return;
    float x = score[i];
    int64_t t = token[i];
    score[i] = score[worst], token[i] = token[worst];
    score[worst] = x, token[worst] = t;
    i = worst;
  }
}

static void rise(float *score, int64_t *token, int i) {
  for (; i; i = (i - 1) / 2) {
    int up = (i - 1) / 2;
    if (!is_worse(score[i], token[i], score[up], token[up])) return;
    float x = score[i];
    int64_t t = token[i];
    score[i] = score[up], token[i] = token[up];
    score[up] = x, token[up] = t;
  }
}

static void rank_row(const float *x, int64_t width, float temperature, int count, float *score,
                     int64_t *token, float *norm, float *whole) {
  int size = 0;
  for (int64_t i = 0; i < width; i += LANES) {
    int lanes = width - i < LANES ? (int)(width - i) : LANES;
    if (lanes == LANES) {
      vec block = load_f32(x + i);
      if (size == count && !exceeds(block, score[0])) continue;
    }
    for (int lane = 0; lane < lanes; lane++) {
      float value = x[i + lane];
      if (size < count) {
        score[size] = value, token[size] = i + lane;
        rise(score, token, size++);
      } else if (value > score[0]) {
        score[0] = value, token[0] = i + lane;
        sink(score, token, size);
      }
    }
  }
  while (size > 1) {
    float worst = score[0];
    int64_t at = token[0];
    size--;
    score[0] = score[size], token[0] = token[size];
    score[size] = worst, token[size] = at;
    sink(score, token, size);
  }
  float most = score[0];
  vec plain = splat(0), cooled = splat(0);
  float cooling = 1.0f / temperature;
  float tail[LANES];
  for (int64_t i = 0; i < width; i += LANES) {
    vec block;
    if (width - i < LANES) {
      for (int lane = 0; lane < LANES; lane++) tail[lane] = i + lane < width ? x[i + lane] : -INFINITY;
      block = load_f32(tail);
    } else {
      block = load_f32(x + i);
    }
    block = (block - most) * LOG2E;
    plain += power_of_two(block);
    cooled += power_of_two(block * cooling);
  }
  *norm = most + logf(sum(plain));
  *whole = logf(sum(cooled));
  for (int i = 0; i < count; i++) score[i] = (score[i] - most) * cooling;
}

// The `count` largest of each row x [R, width], in order: score [R, count] is their distance from
// the largest over the row's temperature, token [R, count] where they stand. norm [R] is the log of
// the sum of exp(x), whole [R] that of exp((x - largest) / temperature).
void rank_f32(const float *x, int rows, int64_t width, const float *temperature, int count,
              float *score, int64_t *token, float *norm, float *whole, int threads) {
  threads = num_workers(threads < rows ? threads : rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int row = 0; row < rows; row++)
    rank_row(x + row * width, width, temperature[row], count, score + (int64_t)row * count,
             token + (int64_t)row * count, norm + row, whole + row);
}

// Which of a row's ranked tokens a number in 0 ... 1 falls on, among those that top_k, top_p and
// min_p keep; -1 where more than `count` of them would be needed to tell.
static int64_t pick_row(const float *score, const int64_t *token, float whole, int count,
                        int64_t vocabulary, const float *settings) {
  float top_k = settings[0], top_p = settings[1], min_p = settings[2], noise = settings[3];
  int limited = top_k > 0 && top_k <= count, size = limited ? (int)top_k : count, kept = 0;
  if (limited) {
    float sum = 0;
    for (int i = 0; i < size; i++) sum += expf(score[i]);
    whole = logf(sum);
  }
  float total = 0, first = expf(score[0] - whole);
  for (; kept < size; kept++) {
    float share = expf(score[kept] - whole);
    if (kept && !(total < top_p && share >= min_p * first)) break;
    total += share;
  }
  if (!limited && kept == count && count < vocabulary) return -1;
  float mass = 0;
  for (int i = 0; i < kept; i++) {
    mass += expf(score[i] - whole);
    if (mass > noise * total) return token[i];
  }
  return token[kept - 1];
}

// score, token [R, count] and whole [R] as rank_f32 leaves them; settings [R, 4]: top_k (0 for
// none), top_p, min_p, a number in 0 ... 1.
void pick_f32(const float *score, const int64_t *token, const float *whole, int rows, int count,
              int64_t vocabulary, const float *settings, int64_t *picked) {
  for (int row = 0; row < rows; row++)
    picked[row] = pick_row(score + (int64_t)row * count, token + (int64_t)row * count, whole[row],
                           count, vocabulary, settings + 4 * row);
}
