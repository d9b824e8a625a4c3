// The decoder layers of the Llama shape, one after another:
//   h = norm(x += y);  qkv = h Wqkv;  rotate, write to the cache;  attend;  y = out Wo
//   h = norm(x += y);  gate, up = h Wgu;                           y = (silu(gate) * up) Wdown

#pragma once
#include "attention_merge.h"
#include "matrix.h"

INLINE void multiply(const Matrix *m, const scalar_t *x, int rows, scalar_t *out, int threads) {
  if (m->is_int8) int8_matrix(m, x, rows, out, threads);
  else float_matrix(m, x, rows, out, threads);
}

// x [T, E] goes through the layers; what the last one adds to it stays in a->output.
EXPORT void decoder_layers(const Layer *layers, int count, const LayerKind *kinds, const Activations *a,
                           scalar_t *x, int width, const int64_t *slots) {
  scalar_t *h = a->hidden, *qkv = a->qkv, *attended = a->attended, *y = a->output;
  scalar_t *gate_up = a->gate_up, *active = a->activated;
  for (const Layer *layer = layers; layer < layers + count; layer++) {
    const LayerKind *kind = kinds + layer->kind;
    const AttentionParams *p = kind->params;
    int rows = p->num_tokens, threads = p->num_threads;
    add_norm(x, layer == layers ? 0 : y, layer->before_attention, layer->attention_eps, rows,
             width, h, threads);
    multiply(&layer->qkv, h, rows, qkv, threads);
    rotate_write(p, qkv, layer->q_norm, layer->k_norm, layer->head_eps, kind->cos, kind->sin, slots,
                 layer->keys, layer->values);
    block_attention(p, qkv, layer->keys, layer->values, 0, attended, a->lse, kind->workspace);
    multiply(&layer->out, attended, rows, y, threads);
    add_norm(x, y, layer->before_mlp, layer->mlp_eps, rows, width, h, threads);
    multiply(&layer->gate_up, h, rows, gate_up, threads);
    silu_mul(gate_up, rows, (int)layer->gate_up.columns / 2, active, threads);
    multiply(&layer->down, active, rows, y, threads);
  }
}
