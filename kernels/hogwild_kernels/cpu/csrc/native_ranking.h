// The largest of many numbers, a heap whose root is the worst of the best; and which of them is
// drawn.

// Beyond MOST_RANKED sampling.py sorts whole rows.
enum { FEW_RANKED = 64, MOST_RANKED = 1024 };

typedef struct {
  int size;
  float score[MOST_RANKED];
  int64_t token[MOST_RANKED];  // where the scores stand
} Ranking;

// Whether a comes after b; of equals the later one.
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

static void sink(Ranking *best, int size) {
  for (int i = 0;;) {
    int worst = i, left = 2 * i + 1;
    for (int child = left; child < left + 2 && child < size; child++)
      if (is_worse(best, child, worst)) worst = child;
    if (worst == i) return;
    swap(best, i, worst);
    i = worst;
  }
}

static void rise(Ranking *best) {
  for (int i = best->size - 1; i && is_worse(best, i, (i - 1) / 2); i = (i - 1) / 2)
    swap(best, i, (i - 1) / 2);
}

// Takes a number in if it is among the `count` largest so far.
static void take_in(Ranking *best, int count, float score, int64_t token) {
  if (best->size < count) {
    best->score[best->size] = score, best->token[best->size] = token;
    best->size++;
    rise(best);
  } else if (score > best->score[0]) {
    best->score[0] = score, best->token[0] = token;
    sink(best, count);
  }
}

// The best first.
static void put_in_order(Ranking *best) {
  for (int last = best->size - 1; last > 0; last--) {
    swap(best, 0, last);
    sink(best, last);
  }
}

// Where a number in 0 ... 1 falls among the ranked tokens that top_k, top_p and min_p keep; -1
// where more of the `width` tokens would be needed to tell. Scores are distances from the largest
// over the temperature; `whole` is the sum of exp(score) over all tokens.
static int pick(const Ranking *best, float whole, int64_t width, float top_k, float top_p,
                float min_p, float noise) {
  int limited = top_k > 0 && top_k <= best->size, kept = 0;
  int size = limited ? (int)top_k : best->size;
  if (limited) {
    whole = 0;
    for (int i = 0; i < size; i++) whole += expf(best->score[i]);
  }
  float total = 0, first = expf(best->score[0]);
  for (; kept < size; kept++) {
    float weight = expf(best->score[kept]);
    if (kept && !(total < top_p * whole && weight >= min_p * first)) break;
    total += weight;
  }
  if (!limited && kept == size && size < width) return -1;
  float mass = 0;
  for (int i = 0; i < kept; i++) {
    mass += expf(best->score[i]);
    if (mass > noise * total) return i;
  }
  return kept - 1;
}
