// scalar_t: the dtype of this library, chosen by -DDTYPE_F32 or -DDTYPE_BF16. All arithmetic is in
// float32: load and store convert 16 scalars.

#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif
#include "vectors.h"

#define EXPORT __attribute__((visibility("protected")))  // called from Python

#ifdef DTYPE_BF16
typedef uint16_t scalar_t;
INLINE f32x16 load(const scalar_t *p) { return load_bf16(p); }
INLINE void store(scalar_t *p, f32x16 x) { store_bf16(p, x); }
#else
typedef float scalar_t;
INLINE f32x16 load(const scalar_t *p) { return load_f32(p); }
INLINE void store(scalar_t *p, f32x16 x) { store_f32(p, x); }
#endif

INLINE int team_size(int num_threads) {
#ifdef _OPENMP
  return num_threads;
#else
  return 1;
#endif
}

// Whether one instruction multiplies pairs of bfloat16 values.
#if defined(DTYPE_BF16) && defined(__AVX512BF16__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif
