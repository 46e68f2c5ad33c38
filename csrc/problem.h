// Problem: what a kernel reads at run time. Compiled by the host compiler and by NVRTC, so it includes nothing but
// the field list.
#pragma once

#include "options.h"

namespace jax_flash {

enum class DType { f16, bf16, f32, f64 };
enum class Pass { forward, backward };

// A [batch, length, heads, head_dim] array whose head_dim is contiguous. Strides are in elements.
struct Tensor {
  void* data;
  long long batch_stride;
  long long row_stride;
  long long head_stride;
};

struct Problem {
  Options options;

  int batch;      // B >= 1
  int q_length;   // T >= 1
  int kv_length;  // S >= 1
  int q_heads;    // N, a multiple of kv_heads
  int kv_heads;   // K >= 1
  int head_dim;   // H in 1..256

  Tensor q;    // [B, T, N, H]
  Tensor k;    // [B, S, K, H]
  Tensor v;    // [B, S, K, H]
  Tensor out;  // [B, T, N, H], forward only

  // Statistics are float, or double for float64 inputs, contiguous.
  void* lse;    // [B, N, T] natural logarithm; written by forward, read by backward
  void* delta;  // [B, N, T] rowsum(dout * out) - dlse; backward only

  Tensor dout;    // [B, T, N, H], backward only
  Tensor dq;      // [B, T, N, H], backward only
  Tensor dk;      // [B, S, K, H], backward only
  Tensor dv;      // [B, S, K, H], backward only
  void* scratch;  // backward only: see the kernel that uses it; null when it asks for none

#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_POINTER(type, name) const type* name;
  JAX_FLASH_OPTIONS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_POINTER)
#undef JAX_FLASH_POINTER
#undef JAX_FLASH_NOTHING
};

}  // namespace jax_flash
