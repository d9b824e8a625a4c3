// Included by native.c once for each storage type: a model's decoder layers, one after another.
// WHOLE_MATRIX multiplies with a weight of whole numbers.

INLINE void NAME(multiply)(const Matrix *m, const STORED *x, int rows, STORED *out, int threads) {
  if (m->whole) WHOLE_MATRIX(m, x, rows, out, threads);
  else NAME(matrix)(m, x, rows, out, threads);
}

// x [T, E] goes through the layers; what the last one adds to it is left in scratch->y.
void NAME(layers)(const Layer *layers, int count, const View *views, const Scratch *scratch,
                  STORED *x, int width, const int64_t *slots) {
  STORED *h = scratch->h, *qkv = scratch->qkv, *read = scratch->read, *y = scratch->y;
  STORED *gate_up = scratch->gate_up, *active = scratch->active;
  for (const Layer *layer = layers; layer < layers + count; layer++) {
    const View *view = views + layer->view;
    const Job *job = view->job;
    int rows = job->num_rows, threads = job->threads;
    NAME(add_norm)(x, layer == layers ? 0 : y, layer->before_attention, layer->attention_eps, rows,
                   width, h, threads);
    NAME(multiply)(&layer->qkv, h, rows, qkv, threads);
    NAME(rotate_write)(job, qkv, layer->q_norm, layer->k_norm, layer->head_eps, view->cos,
                       view->sin, slots, layer->keys, layer->values);
    NAME(block_attention)(job, qkv, layer->keys, layer->values, 0, read, scratch->lse, view->work);
    NAME(multiply)(&layer->out, read, rows, y, threads);
    NAME(add_norm)(x, y, layer->before_mlp, layer->mlp_eps, rows, width, h, threads);
    NAME(multiply)(&layer->gate_up, h, rows, gate_up, threads);
    NAME(silu_mul)(gate_up, rows, (int)layer->gate_up.columns / 2, active, threads);
    NAME(multiply)(&layer->down, active, rows, y, threads);
  }
}
