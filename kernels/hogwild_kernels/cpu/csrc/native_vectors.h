// Vectors of 16 numbers: how they are stored, and what is computed with them.

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

enum { LANES = 16 };

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
