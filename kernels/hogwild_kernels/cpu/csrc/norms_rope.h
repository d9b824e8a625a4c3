// What stands between the matrices of a decoder layer, row by row: residual + RMS norm, SiLU, RoPE with
// the write to the KV cache, and the quantization of inputs to int8. Widths are multiples of 16.

#pragma once
#include "attention.h"

// Return 1 / sqrt(mean(x^2) + eps): an RMS norm is x times that times the weight.
INLINE float inverse_rms(const scalar_t *x, int width, float eps) {
  f32x16 squares = splat(0);
  for (int i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
  return 1.0f / sqrtf(sum_lanes(squares) / width + eps);
}

// x [T, width] += y unless y is null; out = RMS norm of x.
EXPORT void add_norm(scalar_t *x, const scalar_t *y, const scalar_t *weight, float eps, int rows,
                     int width, scalar_t *out, int threads) {
  threads = (int64_t)rows * width < 65536 ? 1 : team_size(threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int row = 0; row < rows; row++) {
    scalar_t *at = x + (int64_t)row * width;
    if (y)
      for (int i = 0; i < width; i += LANES)
        store(at + i, load(at + i) + load(y + (int64_t)row * width + i));
    float factor = inverse_rms(at, width, eps);
    for (int i = 0; i < width; i += LANES)
      store(out + (int64_t)row * width + i, factor * load(at + i) * load(weight + i));
  }
}

// gate_up [T, 2 * width] -> out [T, width] = silu(gate) * up.
EXPORT void silu_mul(const scalar_t *gate_up, int rows, int width, scalar_t *out, int threads) {
  threads = (int64_t)rows * width < 32768 ? 1 : team_size(threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int row = 0; row < rows; row++) {
    const scalar_t *gate = gate_up + (int64_t)row * 2 * width, *up = gate + width;
    for (int i = 0; i < width; i += LANES) {
      f32x16 x = load(gate + i);
      f32x16 power = -max_of(x * LOG2E, splat(-128.0f));
      store(out + (int64_t)row * width + i, x / (1.0f + exp2_approx(power)) * load(up + i));
    }
  }
}

INLINE void rotate_head(scalar_t *x, const scalar_t *norm, float eps, const float *cos,
                        const float *sin, int dim, scalar_t *to) {
  float factor = norm ? inverse_rms(x, dim, eps) : 1;
  for (int i = 0; i < dim / 2; i += LANES) {
    f32x16 a = load(x + i), b = load(x + dim / 2 + i);
    if (norm) {
      a *= factor * load(norm + i);
      b *= factor * load(norm + dim / 2 + i);
    }
    f32x16 c = load_f32(cos + i), s = load_f32(sin + i);
    store(to + i, a * c - b * s);
    store(to + dim / 2 + i, b * c + a * s);
  }
}

// qkv [T, (H + 2 * KH) * D]: norm and rotate queries in place; norm and rotate keys and write them
// and the values to their slots. A negative slot is not written.
EXPORT void rotate_write(const AttentionParams *p, scalar_t *qkv, const scalar_t *q_norm,
                         const scalar_t *k_norm, float eps, const float *cos, const float *sin,
                         const int64_t *slots, scalar_t *k, scalar_t *v) {
  int dim = p->head_dim, heads = p->num_heads, kv_heads = p->num_kv_heads;
  int threads = p->num_tokens < 64 ? 1 : team_size(p->num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int row = 0; row < p->num_tokens; row++) {
    scalar_t *at = qkv + row * p->q_stride;
    const float *c = cos + (int64_t)row * (dim / 2), *s = sin + (int64_t)row * (dim / 2);
    for (int head = 0; head < heads; head++, at += dim)
      rotate_head(at, q_norm, eps, c, s, dim, at);
    if (slots[row] < 0) continue;
    int64_t slot = slots[row] / p->page_size * p->page_stride +
                   slots[row] % p->page_size * p->slot_stride;
    for (int head = 0; head < kv_heads; head++, at += dim)
      rotate_head(at, k_norm, eps, c, s, dim, k + slot + head * p->head_stride);
    for (int head = 0; head < kv_heads; head++, at += dim)
      memcpy(v + slot + head * p->head_stride, at, dim * sizeof(scalar_t));
  }
}

// Quantize x * input_scale to uint8 around 128: x * input_scale ~ (out - 128) * scale. Return the
// scale, absmax / 127; NaN if a value is not finite.
static float quantize(const scalar_t *x, const float *input_scale, int width, uint8_t *out) {
  f32x16 peak = splat(0), not_finite = splat(0);
  for (int i = 0; i < width; i += LANES) {
    f32x16 y = load(x + i) * load_f32(input_scale + i);
    peak = max_of(peak, max_of(y, -y));
    not_finite += y - y;
  }
  float absmax = max_lane(peak) + sum_lanes(not_finite);
  float factor = absmax > 1e-30f ? 127.0f / absmax : 0;  // a smaller absmax counts as zero
  for (int i = 0; i < width; i += LANES) {
    f32x16 y = load(x + i) * load_f32(input_scale + i);
    f32x16 rounded = y * factor + (12582912.0f + 128.0f);
    *(u8x16_any *)(out + i) = __builtin_convertvector((u32x16)rounded & 255, u8x16);
  }
  return absmax / 127.0f;
}
