// Included by native.c once for each storage type, after native_attention.h: what stands between a
// decoder layer's matrices. Widths are multiples of 16.

// One row's RMS norm: x / sqrt(mean(x^2) + eps) * weight; without a weight x stays as it is.
INLINE float NAME(inverse_rms)(const STORED *x, int width, float eps) {
  vec squares = splat(0);
  for (int i = 0; i < width; i += LANES) squares += LOAD(x + i) * LOAD(x + i);
  return 1.0f / sqrtf(sum(squares) / width + eps);
}

// x [T, width] += y where y is given; out = norm(x) * weight.
void NAME(add_norm)(STORED *x, const STORED *y, const STORED *weight, float eps, int rows,
                    int width, STORED *out, int threads) {
  threads = (int64_t)rows * width < 65536 ? 1 : num_workers(threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int row = 0; row < rows; row++) {
    STORED *at = x + (int64_t)row * width;
    if (y)
      for (int i = 0; i < width; i += LANES)
        STORE(at + i, LOAD(at + i) + LOAD(y + (int64_t)row * width + i));
    float factor = NAME(inverse_rms)(at, width, eps);
    for (int i = 0; i < width; i += LANES)
      STORE(out + (int64_t)row * width + i, factor * LOAD(at + i) * LOAD(weight + i));
  }
}

// gate_up [T, 2 * width] -> out [T, width] = silu(gate) * up.
void NAME(silu_mul)(const STORED *gate_up, int rows, int width, STORED *out, int threads) {
  threads = (int64_t)rows * width < 32768 ? 1 : num_workers(threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int row = 0; row < rows; row++) {
    const STORED *gate = gate_up + (int64_t)row * 2 * width, *up = gate + width;
    for (int i = 0; i < width; i += LANES) {
      vec x = LOAD(gate + i);
      vec power = -larger(x * LOG2E, splat(-128.0f));
      STORE(out + (int64_t)row * width + i, x / (1.0f + power_of_two(power)) * LOAD(up + i));
    }
  }
}

INLINE void NAME(rotate_head)(STORED *x, const STORED *norm, float eps, const float *cos,
                              const float *sin, int dim, STORED *to) {
  float factor = norm ? NAME(inverse_rms)(x, dim, eps) : 1;
  for (int i = 0; i < dim / 2; i += LANES) {
    vec a = LOAD(x + i), b = LOAD(x + dim / 2 + i);
    if (norm) {
      a *= factor * LOAD(norm + i);
      b *= factor * LOAD(norm + dim / 2 + i);
    }
    vec c = load_f32(cos + i), s = load_f32(sin + i);
    STORE(to + i, a * c - b * s);
    STORE(to + dim / 2 + i, b * c + a * s);
  }
}

// qkv [T, (H + 2 * KH) * D]: queries are normed and rotated in place, keys normed, rotated and
// written to their slots, values written. Rows with a negative slot are not written.
void NAME(rotate_write)(const Job *job, STORED *qkv, const STORED *q_norm, const STORED *k_norm,
                        float eps, const float *cos, const float *sin, const int64_t *slots,
                        STORED *k, STORED *v) {
  int dim = job->dim, heads = job->num_heads, kv_heads = job->num_kv_heads;
  int threads = job->num_rows < 64 ? 1 : num_workers(job->threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int row = 0; row < job->num_rows; row++) {
    STORED *at = qkv + row * job->q_stride;
    const float *c = cos + (int64_t)row * (dim / 2), *s = sin + (int64_t)row * (dim / 2);
    for (int head = 0; head < heads; head++, at += dim)
      NAME(rotate_head)(at, q_norm, eps, c, s, dim, at);
    if (slots[row] < 0) continue;
    int64_t slot = slots[row] / job->page_size * job->page_stride +
                   slots[row] % job->page_size * job->slot_stride;
    for (int head = 0; head < kv_heads; head++, at += dim)
      NAME(rotate_head)(at, k_norm, eps, c, s, dim, k + slot + head * job->head_stride);
    for (int head = 0; head < kv_heads; head++, at += dim)
      memcpy(v + slot + head * job->head_stride, at, dim * sizeof(STORED));
  }
}

// x [width] * factors [width] ~ (out - 128) * scale, whole numbers in -127 ... 127; gives the scale,
// NaN where a number is not finite.
static float NAME(quantize)(const STORED *x, const float *factors, int width, uint8_t *out) {
  vec peak = splat(0), faults = splat(0);
  for (int i = 0; i < width; i += LANES) {
    vec y = LOAD(x + i) * load_f32(factors + i);
    peak = larger(peak, larger(y, -y));
    faults += y - y;
  }
  float most = top(peak) + sum(faults);
  float factor = most > 1e-30f ? 127.0f / most : 0;  // what is less counts as zero
  for (int i = 0; i < width; i += LANES) {
    vec y = LOAD(x + i) * load_f32(factors + i);
    vec whole = y * factor + (12582912.0f + 128.0f);
    *(bytes_any *)(out + i) = __builtin_convertvector((uvec)whole & 255, bytes);
  }
  return most / 127.0f;
}
