// Constants and structs shared by C and Python: structs.py parses this file, so each is declared once.
// Only the forms used here are understood: enums of NAME = number, and structs of int32_t, int64_t,
// float, pointers, and structs declared above.

#pragma once
#include <stdint.h>

enum { LANES = 16 };  // values of a vector; widths of rows are multiples of it
enum { MAX_HEAD_DIM = 256, MAX_GROUP = 32, MAX_THREADS = 64 };
enum { CHUNK = 512 };  // tokens of a block that one partial softmax takes: 0 to 511, 512 to 1023 ...
enum { MAX_CANDIDATES = 1024 };  // tokens that filtered sampling ranks at most

// Attention of T query tokens over blocks of a paged cache. A *block read* is one appearance of a
// block in the views of consecutive query tokens; a *pair* is one of these tokens with that block.
// Example: a read with first_query 3, num_queries 2, first_pair 5: query token 3 owns pair 5, query
// token 4 pair 6. A pair sees the block's tokens lo[pair] <= token < hi[pair].
typedef struct {
  int32_t num_tokens, num_heads, num_kv_heads, head_dim;  // T, H, KH, D
  int64_t q_stride;                                       // scalars between query tokens
  int64_t page_stride, slot_stride, head_stride;          // scalars, of keys and of values
  int32_t num_reads, max_pages, page_size;
  const int32_t *pages;                                   // [num_reads, max_pages]
  const int32_t *first_query, *num_queries, *first_pair;  // [num_reads]
  const int32_t *lo, *hi;                                 // [num_pairs]
  // Partial softmaxes, one for each pair and chunk in which the pair sees a token. Those of a query
  // token have consecutive numbers, in the order of its view.
  const int32_t *first_partial;                           // [num_pairs]
  const int32_t *partials_of_row;                         // [T + 1]: the first one of each query token
  int64_t max_partials;                                   // that the workspace holds
  const float *cos, *sin;                                 // [num_pairs, D / 2]: extra rotation of q
  float scale, softcap;                                   // softcap 0: none
  int32_t num_threads, use_amx;
} AttentionParams;

// The weight of a linear layer. An int8 weight has a scale and a zero point for each column, and the
// input is multiplied by input_scale (SmoothQuant) before it is quantized to uint8 row by row.
// A packed weight holds word i (32 bits) of 16 columns side by side, then word i + 1 of them.
typedef struct {
  const void *weight;         // [columns, row_bytes / bytes of a value]
  const void *bias;           // [columns], or null
  const float *scale;         // [columns], int8 only
  const float *input_scale;   // [in], int8 only
  const int32_t *zero_point;  // [columns]: 128 * sum of the column's weights, int8 only
  int64_t columns, row_bytes;
  int32_t use_amx, is_int8, is_packed;
} Matrix;

// One decoder layer. q_norm and k_norm may be null; kind is an index into the array of
// LayerKinds.
typedef struct {
  Matrix qkv, out, gate_up, down;
  const void *before_attention, *before_mlp, *q_norm, *k_norm;  // weights of RMS norms
  void *keys, *values;
  float attention_eps, mlp_eps, head_eps;
  int32_t kind;
} Layer;

// What layers of one kind (same RoPE, same sliding window) attend to.
typedef struct {
  const AttentionParams *params;
  float *workspace;        // [max_partials, H, D + 2]
  const float *cos, *sin;  // [T, D / 2]: RoPE at block-local positions
} LayerKind;

// Activations that all layers reuse.
typedef struct {
  void *hidden, *qkv, *attended, *output, *gate_up, *activated;
  float *lse;
} Activations;
