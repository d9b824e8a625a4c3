// Attention over blocks, decoder layers and sampling, for the CPU.
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

#include "native_vectors.h"

// MAX_DIM and MAX_THREADS are known to native.py too.
enum { TILE = 64, WIDTH = TILE / LANES, MAX_ROWS = 96, CHUNK = 512, BLOCK = 32 };
enum { MAX_DIM = 256, MAX_THREADS = 64 };

INLINE int num_workers(int threads) {
#ifdef _OPENMP
  return threads;
#else
  return 1;
#endif
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

// 16 rows of x, from byte 64 * step on, a column a row: what a tile multiplies.
static void lay_tile(const char *x, int64_t bytes, int rows, int64_t row, int64_t step, char *to) {
  uvec lanes[LANES] = {};
  for (int r = 0; r < LANES && row + r < rows; r++)
    lanes[r] = *(const uvec_any *)(x + (row + r) * bytes + step * 64);
  transpose(lanes);
  memcpy(to, lanes, sizeof(lanes));
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

// A thread takes as many columns at a time. Up to DOT_ROWS rows of whole numbers go without tiles:
// their sums are the same. Those of other numbers would change with what else is in a pass.
enum { COLUMNS = 64, DOT_ROWS = 4 };

// Whether matrices are worth their code: 16 numbers are one register.
int has_wide_vectors(void) {
#ifdef __AVX512F__
  return 1;
#else
  return 0;
#endif
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

#include "native_ranking.h"

#define NAME(name) name##_f32
#define STORED float
#define LOAD load_f32
#define STORE store_f32
#define DOTS 0
#include "native_attention.h"
#include "native_rows.h"
#include "native_draw.h"
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
#include "native_rows.h"
#include "native_draw.h"
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
