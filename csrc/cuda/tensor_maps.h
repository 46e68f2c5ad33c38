// The tensor maps that a kernel with TMA loads takes in addition to Problem. The host compiler and NVRTC both compile
// this header, so it includes nothing.
#pragma once

namespace jax_flash {

// The driver's CUtensorMap.
struct TensorMap {
  alignas(64) unsigned long long opaque[16];
};

// Of [batch, length, heads, head_dim] arrays of 16-bit elements. Coordinates are {column, row, head, batch}. A load
// reads a box of kBoxColumns columns and of as many rows of one head as the kernel's KernelTraits say, with the
// 128-byte swizzle; elements outside the array are read as zeros, and count among the bytes that the mbarrier expects.
// A store writes such a box, and nothing outside the array.
struct TensorMaps {
  TensorMap q, k, v;
  TensorMap dout, dk, dv;  // in backward only
};

constexpr int kBoxColumns = 64;  // 128 bytes

}  // namespace jax_flash
