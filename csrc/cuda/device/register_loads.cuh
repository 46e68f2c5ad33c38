// What comes from global memory, on GPUs without cp.async: read into registers before a product, so that the product
// hides the way, and written to shared memory after it.
#pragma once

#include "cuda/device/prelude.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/thread_rows.cuh"

namespace jax_flash {

constexpr bool loads_take_registers = true;
constexpr bool one_warp_loads = false;

JAX_FLASH_DEVICE void copies_commit() {}
template <int pending>
JAX_FLASH_DEVICE void copies_wait() {}

JAX_FLASH_DEVICE uint4 load_chunk(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

// Rows [first, first + T::rows) of one head on their way into a tile; rows from `length` on become zeros, and so do the
// columns from `columns` on. A row of two limbs has the columns of one and then of the other. The code
// is as long as there are registers, with `short_code` too.
template <typename T, int columns, int threads, bool short_code = false>
struct TileLoad : ThreadRows<T, threads> {
  using Rows = ThreadRows<T, threads>;
  using Rows::chunk_of, Rows::in_tile, Rows::pass_rows, Rows::passes, Rows::row_chunks, Rows::row_of, Rows::row_threads;
  static constexpr int filled = columns / chunk_elements, limb_chunks = T::chunks / limbs;

  uint4 chunks[passes][row_chunks];

  // What `start` takes for a head: this thread's first chunk of row 0. Opaque, or the compiler would keep the terms of
  // the sum instead.
  static __device__ __forceinline__ const Element* base(const Element* head, i64 row_stride, int thread) {
    head += row_of(thread) * row_stride + chunk_of(thread) * chunk_elements;
    asm volatile("" : "+l"(head));
    return head;
  }

  // One pass; `valid` when its row is there.
  static __device__ __forceinline__ void fetch(uint4 (&to)[row_chunks], const Element* from, bool valid, int thread) {
#pragma unroll
    for (int j = 0; j < row_chunks; ++j) {
      const int chunk = j * row_threads + chunk_of(thread), limb = limbs == 1 ? 0 : chunk / limb_chunks;
      const bool full = filled == limb_chunks || (limbs == 1 && (j + 1) * row_threads <= filled) ||
                        chunk - limb * limb_chunks < filled;
      to[j] = {0, 0, 0, 0};
      if (valid && full) {
        to[j] = load_chunk(from + (j * row_threads - limb * (limb_chunks - filled)) * chunk_elements);
      }
    }
  }
  static __device__ __forceinline__ void put(u32 to, const uint4 (&chunks)[row_chunks]) {
#pragma unroll
    for (int j = 0; j < row_chunks; ++j) store_shared(to + j * row_threads * 16, chunks[j]);
  }

  template <bool whole = false>  // when no row lies beyond the end
  __device__ __forceinline__ void start(u32, const Element* base, i64 row_stride, int first, int length, int thread) {
    const Element* from = base + first * row_stride;
    const int row = row_of(thread);
    if (whole || first + T::rows <= length) {
#pragma unroll
      for (int i = 0; i < passes; ++i) {
        fetch(chunks[i], from + i * pass_rows * row_stride, in_tile(row + i * pass_rows), thread);
      }
    } else {
#pragma unroll
      for (int i = 0; i < passes; ++i) {
        const bool valid = in_tile(row + i * pass_rows) && first + row + i * pass_rows < length;
        fetch(chunks[i], from + i * pass_rows * row_stride, valid, thread);
      }
    }
  }
  // Rows of a head that are listed.
  template <typename Listed>
  __device__ __forceinline__ void start_listed(u32, const Listed& rows, const Element* head, i64 row_stride,
                                               int thread) {
    head += chunk_of(thread) * chunk_elements;
#pragma unroll
    for (int i = 0; i < passes; ++i) {
      const bool valid = rows.numbers[i] >= 0;
      fetch(chunks[i], head + (valid ? rows.numbers[i] : 0) * row_stride, valid, thread);
    }
  }
  __device__ __forceinline__ void finish(u32 tile, int thread) const {
    // Chunks change places by the row modulo 16 at most, which every so many passes comes back to where it was.
    constexpr int phases = pass_rows % 16 == 0 ? 1 : pass_rows % 8 == 0 ? 2 : pass_rows % 4 == 0 ? 4 : 8;
    static_assert(pass_rows % 2 == 0);
    const int row = row_of(thread);
    u32 to[phases];
#pragma unroll
    for (int i = 0; i < phases; ++i) to[i] = tile + T::offset(row + i * pass_rows, chunk_of(thread));
#pragma unroll
    for (int i = 0; i < passes; ++i) {
      if (in_tile(row + i * pass_rows)) put(to[i % phases] + i / phases * phases * pass_rows * T::row_bytes, chunks[i]);
    }
  }
};

// All at once, a few passes at a time.
template <typename T, int columns, int threads>
JAX_FLASH_DEVICE void load_tile(u32 tile, const Element* head, i64 row_stride, int first, int length, int thread) {
  using Load = TileLoad<T, columns, threads>;
  constexpr int together = at_most(Load::passes, at_least(1, 8 / Load::row_chunks));
  const Element* from = Load::base(head, row_stride, thread);
#pragma unroll 1
  for (int i = 0; i < Load::passes; i += together) {
    uint4 chunks[together][Load::row_chunks];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int passed = (i + j) * Load::pass_rows, row = Load::row_of(thread) + passed;
      Load::fetch(chunks[j], from + (first + passed) * row_stride, row < T::rows && first + row < length, thread);
    }
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int row = Load::row_of(thread) + (i + j) * Load::pass_rows;
      if (row < T::rows) Load::put(tile + T::offset(row, Load::chunk_of(thread)), chunks[j]);
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
