// TensorMaps: what the copy engine of compute capability 9.0 reads arrays by. Compiled by the host compiler and by NVRTC.
#pragma once

namespace jax_flash {

// The driver's CUtensorMap, of an array [batch, length, heads, head_dim] of 16-bit elements; its dimensions, fastest
// first, are head_dim, length, heads, batch. A box has 64 columns and as many rows as the kernel's LaunchFacts say; in
// shared memory a row of it is a line of 128 bytes, its chunks of 16 bytes swizzled. What is out of range is zeros.
struct TensorMap {
  alignas(64) unsigned long long opaque[16];
};

struct TensorMaps {
  TensorMap q, k, v, dout;
};

}  // namespace jax_flash
