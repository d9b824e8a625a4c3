// Attention over blocks and the small operations of a decoder layer, for the CPU.
//
// Plain C with the vector extensions of GCC and Clang; native_build.py compiles it on first use,
// native.py and its neighbours call it through ctypes and check sizes. Threads come from OpenMP
// where the compiler has it. Every entry point exists for float and for bfloat16 storage (suffixes
// _f32 and _bf16) and computes in float32, but for matrices of whole numbers (suffixes _int8_f32
// and _int8_bf16).

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512BF16__) && defined(__linux__)
#define TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define TILES 0
#endif

typedef float vec __attribute__((vector_size(64)));
typedef float vec_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef int32_t ivec_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint32_t uvec_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef uint16_t wide __attribute__((vector_size(64)));
typedef uint16_t wide_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint8_t bytes __attribute__((vector_size(16)));
typedef uint8_t bytes_any __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t hvec_any __attribute__((vector_size(32), aligned(2), may_alias));

// MAX_DIM and MAX_THREADS are known to native.py too.
enum { LANES = 16, TILE = 64, WIDTH = TILE / LANES, MAX_ROWS = 96, CHUNK = 512, BLOCK = 32 };
enum { MAX_DIM = 256, MAX_THREADS = 64 };

#define INLINE static inline __attribute__((always_inline))
#define LOG2E 1.44269504f
#define UNROLL _Pragma("GCC unroll 16")

// Storage

INLINE vec load_f32(const float *p) { return *(const vec_any *)p; }
INLINE void store_f32(float *p, vec x) { *(vec_any *)p = x; }
INLINE vec load_bf16(const uint16_t *p) {
  return (vec)(__builtin_convertvector(*(const hvec_any *)p, uvec) << 16);
}
INLINE void store_bf16(uint16_t *p, vec x) {
#ifdef __AVX512BF16__
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  memcpy(p, &rounded, 32);
#else
  uvec bits = (uvec)x;
  uvec even = bits + 0x7fff + ((bits >> 16) & 1);
  uvec nan = (bits & 0xffff0000) | 0x400000;
  ivec is_nan = x != x;
  bits = ((uvec)is_nan & nan) | (~(uvec)is_nan & even);
  *(hvec_any *)p = __builtin_convertvector(bits >> 16, hvec);
#endif
}

// Arithmetic

INLINE vec splat(float x) { return x - (vec){}; }
INLINE vec larger(vec a, vec b) {
  ivec more = a > b;
  return (vec)((more & (ivec)a) | (~more & (ivec)b));
}
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
#define FOLD(x, join)                                                                             \
  x = join(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
  x = join(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));      \
  x = join(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));      \
  x = join(x, __builtin_shufflevector(x, x, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0))
INLINE vec plus(vec a, vec b) { return a + b; }
INLINE float sum(vec x) {
  FOLD(x, plus);
  return x[0];
}
INLINE float top(vec x) {
  FOLD(x, larger);
  return x[0];
}

// 2^x for x <= 128, relative error under 3e-7; inf at 128, 0 below -150.
INLINE vec power_of_two(vec x) {
#ifdef __AVX512F__
  x = (vec)_mm512_max_ps(_mm512_set1_ps(-200), (__m512)x);  // in this order NaN stays NaN
  vec n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  ivec zero = x < -126.0f;
  x = choose(zero, splat(-126.0f), x);
  vec n = x + 12582912.0f - 12582912.0f;  // rounds to whole numbers
#endif
  vec r = x - n;
  vec p = splat(1.53533619e-4f);
  p = p * r + 1.33988744e-3f;
  p = p * r + 9.61843736e-3f;
  p = p * r + 5.55033247e-2f;
  p = p * r + 2.40226479e-1f;
  p = p * r + 6.93147203e-1f;
  p = p * r + 1.0f;
#ifdef __AVX512F__
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  return (vec)(~zero & (ivec)(p * (vec)power));
#endif
}

// Whether a is larger than b in any lane.
INLINE int exceeds(vec a, float b) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(b), _CMP_GT_OQ) != 0;
#else
  return top(a) > b;
#endif
}

INLINE int num_workers(int threads) {
#ifdef _OPENMP
  return threads;
#else
  return 1;
#endif
}

// Columns of 16 rows of 16 words each become rows.
INLINE void transpose(uvec x[LANES]) {
  uvec y[LANES];
  UNROLL for (int i = 0; i < 16; i += 2) {
    y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12,
                                   28, 14, 30);
    y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27,
                                       13, 29, 15, 31);
  }
  UNROLL for (int i = 0; i < 16; i++) if (!(i & 2)) {
    x[i] = __builtin_shufflevector(y[i], y[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13,
                                   28, 29);
    x[i + 2] = __builtin_shufflevector(y[i], y[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27,
                                       14, 15, 30, 31);
  }
  UNROLL for (int i = 0; i < 16; i++) if (!(i & 4)) {
    y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25,
                                   26, 27);
    y[i + 4] = __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15,
                                       28, 29, 30, 31);
  }
  UNROLL for (int i = 0; i < 8; i++) {
    x[i] = __builtin_shufflevector(y[i], y[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21,
                                   22, 23);
    x[i + 8] = __builtin_shufflevector(y[i], y[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27,
                                       28, 29, 30, 31);
  }
}

// Of two rows of bfloat16: a word holds one number of each.
INLINE uvec interleave_low(wide a, wide b) {
  return (uvec)__builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
}
INLINE uvec interleave_high(wide a, wide b) {
  return (uvec)__builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54,
                                       23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30,
                                       62, 31, 63);
}

// Tiles

// Whether the processor has tiles; asks Linux for them.
int has_tiles(void) {
#if TILES
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
  return 0;
#endif
}

#if TILES
// What tiles read is written by now: their intrinsics do not tell the compiler that they read.
#define BEFORE_TILES __asm__ volatile("" ::: "memory")

// All eight of 16 x 16 words.
static void configure_tiles(void) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
  BEFORE_TILES;
  _tile_loadconfig(&shape);
}

// Two rows of 16 numbers as bfloat16, a word of both for each place.
INLINE uvec pair_words(vec a, vec b) {
  wide x = (wide)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  return (uvec)__builtin_shufflevector(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#endif

// What the threads of one call share.
typedef struct {
  int num_rows, num_heads, num_kv_heads, dim;
  int64_t q_stride;                                // elements between rows
  int64_t page_stride, slot_stride, head_stride;   // elements, of keys and of values
  int num_entries, pages_width, page_size;
  const int32_t *pages, *first_row, *counts, *first_pair, *lo, *hi;
  const float *cos, *sin;
  float scale, softcap;
  int threads, tiles;
} Job;

// A thread's running softmax: over every (kv head, row, head of the group), in this order.
typedef struct {
  float *most, *total, *acc;  // [T*H], [T*H, LANES], [T*H, D]
} State;

INLINE State state_of(const Job *job, float *work, int thread) {
  int64_t rows = (int64_t)job->num_rows * job->num_heads;
  float *base = work + thread * rows * (job->dim + LANES + 1);
  return (State){base, base + rows, base + (LANES + 1) * rows};
}

INLINE int64_t state_row(const Job *job, int kv_head, int row, int member) {
  int group = job->num_heads / job->num_kv_heads;
  return ((int64_t)kv_head * job->num_rows + row) * group + member;
}

typedef struct {
  int kv_head, entry, start, stop;
} Task;

static int longest(const Job *job, int entry) {
  int length = 0;
  const int32_t *lo = job->lo + job->first_pair[entry], *hi = job->hi + job->first_pair[entry];
  for (int i = 0; i < job->counts[entry]; i++)
    if (lo[i] < hi[i] && hi[i] > length) length = hi[i];
  return length;
}

static int shortest(const Job *job, int entry) {
  int start = INT32_MAX;
  const int32_t *lo = job->lo + job->first_pair[entry], *hi = job->hi + job->first_pair[entry];
  for (int i = 0; i < job->counts[entry]; i++)
    if (lo[i] < hi[i] && lo[i] < start) start = lo[i];
  return start;
}

// Whether starting a second thread costs more than it saves.
static int is_small(const Job *job) {
  int64_t scores = 0;
  for (int entry = 0; entry < job->num_entries; entry++)
    scores += (int64_t)longest(job, entry) * job->counts[entry];
  return scores * job->num_heads * job->dim < 1 << 18;
}

// Number of tasks; where tasks is given they are written there.
static int list_tasks(const Job *job, Task *tasks) {
  int count = 0;
  for (int entry = 0; entry < job->num_entries; entry++) {
    int length = longest(job, entry);
    if (!length) continue;
    for (int start = shortest(job, entry), next; start < length; start = next) {
      next = start / BLOCK * BLOCK + CHUNK;
      for (int head = 0; head < job->num_kv_heads; head++, count++)
        if (tasks) tasks[count] = (Task){head, entry, start, next < length ? next : length};
    }
  }
  return count;
}

// Matrices

// A weight [columns, bytes of a row], and what belongs to it. Scale, offset and factors are those of
// whole numbers: a row of x times factors becomes bytes of 0 ... 255, 128 standing for zero.
typedef struct {
  const void *weight, *bias;
  const float *scale, *factors;
  const int32_t *offset;
  int64_t columns, bytes;
  int tiles, whole;
} Matrix;

// A thread takes as many columns at a time; up to DOT_ROWS rows go without tiles.
enum { COLUMNS = 64, DOT_ROWS = 4 };

#if TILES
// 16 rows of x, from byte 64 * step on, a column a row: what a tile multiplies.
static void lay_tile(const char *x, int64_t bytes, int rows, int64_t row, int64_t step, char *to) {
  uvec lanes[LANES] = {};
  for (int r = 0; r < LANES && row + r < rows; r++)
    lanes[r] = *(const uvec_any *)(x + (row + r) * bytes + step * 64);
  transpose(lanes);
  memcpy(to, lanes, sizeof(lanes));
}

#endif

// Which kinds of numbers are multiplied fast: 1 float, 2 bfloat16, 4 whole numbers.
int fast_kinds(void) {
  int kinds = 0;
#ifdef __AVX512F__
  kinds |= 1;
#endif
#ifdef __AVX512BF16__
  kinds |= 2;
#endif
#ifdef __AVX512VNNI__
  kinds |= 4;
#endif
  return kinds;
}

#define DOT_FLOATS(acc, w, x) ((acc) + (vec)(w) * (vec)(x))
#ifdef __AVX512BF16__
#define DOT_BF16(acc, w, x) \
  (vec) _mm512_dpbf16_ps((__m512)(acc), (__m512bh)(w), (__m512bh)(x))
#else
#define DOT_BF16(acc, w, x)                                \
  ((acc) + (vec)((w) << 16) * (vec)((x) << 16) +           \
   (vec)((w) & 0xffff0000) * (vec)((x) & 0xffff0000))
#endif
#ifdef __AVX512VNNI__
#define DOT_BYTES(acc, w, x) (ivec) _mm512_dpbusd_epi32((__m512i)(acc), (__m512i)(x), (__m512i)(w))
#else
INLINE ivec dot_bytes(ivec acc, uvec w, uvec x) {
  for (int i = 0; i < 32; i += 8)
    acc += ((ivec)(w << (24 - i)) >> 24) * (ivec)((x >> i) & 255);
  return acc;
}
#define DOT_BYTES dot_bytes
#endif

// Decoder layers

typedef struct {
  Matrix qkv, out, gate_up, down;
  const void *before_attention, *before_mlp, *q_norm, *k_norm;  // weights of norms
  void *keys, *values;
  float attention_eps, mlp_eps, head_eps;
  int view;
} Layer;

// What layers of a kind read, and how their rows are turned.
typedef struct {
  const Job *job;
  float *work;
  const float *cos, *sin;
} View;

typedef struct {
  void *h, *qkv, *read, *y, *gate_up, *active;
  float *lse;
} Scratch;

#define NAME(name) name##_f32
#define STORED float
#define LOAD load_f32
#define STORE store_f32
#define DOTS 0
#include "native_attention.h"
#include "native_layer.h"
#define WHOLE 0
#define SUM vec
#define DOT DOT_FLOATS
#include "native_matrix.h"
#undef NAME
#undef WHOLE
#undef SUM
#undef DOT

#define NAME(name) name##_int8_f32
#define QUANTIZE quantize_f32
#define WHOLE 1
#define SUM ivec
#define DOT DOT_BYTES
#define TILE_DOT _tile_dpbsud
#include "native_matrix.h"
#undef NAME

#define NAME(name) name##_f32
#define WHOLE_MATRIX matrix_int8_f32
#include "native_layers.h"
#undef NAME
#undef WHOLE_MATRIX
#undef STORED
#undef LOAD
#undef STORE
#undef DOTS
#undef QUANTIZE
#undef WHOLE
#undef SUM
#undef DOT
#undef TILE_DOT

#define NAME(name) name##_bf16
#define STORED uint16_t
#define LOAD load_bf16
#define STORE store_bf16
#ifdef __AVX512BF16__
#define DOTS 1
#else
#define DOTS 0
#endif
#include "native_attention.h"
#include "native_layer.h"
#define WHOLE 0
#define SUM vec
#define DOT DOT_BF16
#define TILE_DOT _tile_dpbf16ps
#include "native_matrix.h"
#undef NAME
#undef WHOLE
#undef SUM
#undef DOT
#undef TILE_DOT

#define NAME(name) name##_int8_bf16
#define QUANTIZE quantize_bf16
#define WHOLE 1
#define SUM ivec
#define DOT DOT_BYTES
#define TILE_DOT _tile_dpbsud
#include "native_matrix.h"
#undef NAME

#define NAME(name) name##_bf16
#define WHOLE_MATRIX matrix_int8_bf16
#include "native_layers.h"

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
