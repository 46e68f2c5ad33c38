// What comes from global memory, on GPUs without cp.async: read into registers before a product, so that the product
// hides the way, and written to shared memory after it.
#pragma once

#include "cuda/shared/prelude.cuh"

namespace jax_flash {

constexpr bool loads_take_registers = true;

JAX_FLASH_DEVICE void copies_commit() {}
template <int pending>
JAX_FLASH_DEVICE void copies_wait() {}

JAX_FLASH_DEVICE uint4 load_chunk(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
JAX_FLASH_DEVICE void store_chunk(u32 to, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Rows [first, first + T::rows) of one head on their way into a tile; rows from `length` on become zeros, and so do the
// columns from `columns` on.
template <typename T, int columns, int threads>
struct TileLoad {
  static constexpr int filled = columns / chunk_elements;
  static constexpr int pieces = T::rows * T::chunks;
  static constexpr int of_thread = ceil_div(pieces, threads);
  uint4 chunks[of_thread];

  static __device__ __forceinline__ uint4 fetch(const Element* head, i64 row_stride, int first, int length, int piece) {
    const int row = piece / T::chunks, chunk = piece % T::chunks;
    if ((pieces % threads != 0 && piece >= pieces) || first + row >= length || chunk >= filled) return {0, 0, 0, 0};
    return load_chunk(head + (first + row) * row_stride + chunk * chunk_elements);
  }
  static __device__ __forceinline__ void put(u32 tile, int piece, const uint4& chunk) {
    if (pieces % threads != 0 && piece >= pieces) return;
    store_chunk(tile + T::offset(piece / T::chunks, piece % T::chunks), chunk);
  }

  __device__ __forceinline__ void start(u32, const Element* head, i64 row_stride, int first, int length, int thread) {
#pragma unroll
    for (int i = 0; i < of_thread; ++i) chunks[i] = fetch(head, row_stride, first, length, i * threads + thread);
  }
  __device__ __forceinline__ void finish(u32 tile, int thread) const {
#pragma unroll
    for (int i = 0; i < of_thread; ++i) put(tile, i * threads + thread, chunks[i]);
  }
};

// All at once, a few chunks at a time.
template <typename T, int columns, int threads>
JAX_FLASH_DEVICE void load_tile(u32 tile, const Element* head, i64 row_stride, int first, int length, int thread) {
  using Load = TileLoad<T, columns, threads>;
  constexpr int together = at_most(4, Load::of_thread);
#pragma unroll 1
  for (int i = 0; i < Load::of_thread; i += together) {
    uint4 chunks[together];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      chunks[j] = Load::fetch(head, row_stride, first, length, (i + j) * threads + thread);
    }
#pragma unroll
    for (int j = 0; j < together; ++j) {
      if (Load::of_thread % together == 0 || i + j < Load::of_thread)
        Load::put(tile, (i + j) * threads + thread, chunks[j]);
    }
  }
}

struct FloatLoad {
  float x;
  __device__ __forceinline__ void start(float*, const float* from, bool valid) { x = valid ? *from : 0.f; }
  __device__ __forceinline__ void finish(float* to) const { *to = x; }
};

// Two floats to two float16 elements, the first in the low half. Without a packing conversion.
JAX_FLASH_DEVICE u32 pack(float low, float high) {
  u32 packed;
  asm("{.reg .b16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; mov.b32 %0, {low, high};}"
      : "=r"(packed)
      : "f"(low), "f"(high));
  return packed;
}

}  // namespace jax_flash
