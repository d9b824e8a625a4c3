// All CPU kernels of one dtype. build.py compiles this file with -DDTYPE_F32 and with -DDTYPE_BF16, a
// shared library each, with the same exported functions. Threads come from OpenMP, if the compiler has it.
//
// In reading order:
//   structs.h             constants and structs that Python uses too
//   vectors.h, scalar.h   vectors of 16 values; the dtype of this library
//   amx.h                 AMX tiles
//   attention.h           tasks of an attention call; the running softmax of a thread
//   attention_vectors.h   one task with vectors, attention_amx.h with tiles
//   attention_merge.h     all tasks on the threads, and their merge
//   norms_rope.h          residual + RMS norm, SiLU, RoPE and the write to the cache
//   wide.h                vectors of the processor's own width
//   matrix.h              linear layers; matrix_kernel.h, matrix_packed.h are one kind of them
//   decoder_layers.h      all of the above, layer by layer
//   ranking.h, sampling.h logits to tokens

#include "decoder_layers.h"
#include "sampling.h"
