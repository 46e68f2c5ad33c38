// Ampere's instructions: cp.async and mma.m16n8k16.
#pragma once

namespace jax_flash {
constexpr int column_step = 16;
}

#include "cuda/device/matrices.cuh"
#include "cuda/device/pack.cuh"
#include "cuda/device/thread_rows.cuh"
#include "cuda/sm80/instructions.cuh"

namespace jax_flash {

// Starts the copy of rows [first, first + T::rows) of one head into a tile; rows from `length` on become zeros, and so
// do the columns from `columns` on. A row of two limbs has the columns of one and then of the other. `whole`
// says that no row lies beyond the end; then the tile may be not `wanted`, and there is no branch.
template <typename T, int columns, int threads, bool whole = false>
JAX_FLASH_DEVICE void load_tile(u32 tile, const Element* head, i64 row_stride, int first, int length, int thread,
                                bool wanted = true) {
  constexpr int filled = columns / chunk_elements, limb_chunks = T::chunks / limbs;
  constexpr int pieces = T::rows * T::chunks;
  // Where a pass of all threads covers whole rows, each thread keeps its chunk, and its swizzle changes with the row
  // modulo 8 alone: one pointer moves on, and shared addresses of the same phase differ by constants.
  constexpr int rows_a_pass = threads / T::chunks;
  constexpr bool regular = threads % T::chunks == 0 && (rows_a_pass % 8 == 0 || 8 % rows_a_pass == 0);
  if constexpr (T::swizzled && regular && pieces % threads == 0 && filled == limb_chunks) {
    constexpr int phases = rows_a_pass % 8 == 0 ? 1 : 8 / rows_a_pass;
    const int row = thread / T::chunks, chunk = thread % T::chunks;
    u32 to[phases];
#pragma unroll
    for (int phase = 0; phase < phases; ++phase) to[phase] = tile + T::offset(row + phase * rows_a_pass, chunk);
    const Element* from = head + (first + row) * row_stride + chunk * chunk_elements;
    const i64 step = rows_a_pass * row_stride;
    if constexpr (whole) {
#pragma unroll
      for (int i = 0; i < pieces / threads; ++i, from += step) {
        copy_async_if(wanted, to[i % phases] + i / phases * phases * rows_a_pass * T::row_bytes, from);
      }
    } else if (first + T::rows <= length) {
#pragma unroll
      for (int i = 0; i < pieces / threads; ++i, from += step) {
        copy_async(to[i % phases] + i / phases * phases * rows_a_pass * T::row_bytes, from);
      }
    } else {
#pragma unroll
      for (int i = 0; i < pieces / threads; ++i, from += step) {
        const bool valid = first + row + i * rows_a_pass < length;
        copy_async(to[i % phases] + i / phases * phases * rows_a_pass * T::row_bytes, valid ? from : head, valid);
      }
    }
  } else if (wanted) {
    using Rows = ThreadRows<T, threads>;
    const int row = Rows::row_of(thread), chunk = Rows::chunk_of(thread);
    const Element* from = head + (first + row) * row_stride + chunk * chunk_elements;
#pragma unroll
    for (int i = 0; i < Rows::passes; ++i, from += Rows::pass_rows * row_stride) {
      const int here = row + i * Rows::pass_rows;
      if (!Rows::in_tile(here)) break;
      const u32 to = tile + T::offset(here, chunk);
#pragma unroll
      for (int j = 0; j < Rows::row_chunks; ++j) {
        const int of_row = chunk + j * Rows::row_threads, limb = limbs == 1 ? 0 : of_row / limb_chunks;
        const bool valid = first + here < length && (filled == limb_chunks || of_row - limb * limb_chunks < filled);
        const Element* source = from + (j * Rows::row_threads - limb * (limb_chunks - filled)) * chunk_elements;
        copy_async(to + j * Rows::row_threads * 16, valid ? source : head, valid);
      }
    }
  }
}

// The same for small problems, which wait for instructions longer than for anything else: `from` is this thread's first
// chunk of row `first`, worked out before there was anything to read, and a tile that is not whole is a loop.
template <typename T, int columns, int threads>
struct ShortLoad {
  using Rows = ThreadRows<T, threads>;
  static constexpr int filled = columns / chunk_elements, limb_chunks = T::chunks / limbs;
  static constexpr int rows_a_pass = threads / T::chunks, passes = T::rows * T::chunks / threads;
  static constexpr bool regular = T::swizzled && threads % T::chunks == 0 &&
                                  (rows_a_pass % 8 == 0 || 8 % rows_a_pass == 0) &&
                                  T::rows * T::chunks % threads == 0 && filled == limb_chunks;
  static constexpr int phases = !regular || rows_a_pass % 8 == 0 ? 1 : at_most(8 / rows_a_pass, passes);
  static_assert(!regular || passes % phases == 0);

  static __device__ __forceinline__ int row_of(int thread) {
    return regular ? thread / T::chunks : Rows::row_of(thread);
  }
  static __device__ __forceinline__ int chunk_of(int thread) {
    return regular ? thread % T::chunks : Rows::chunk_of(thread);
  }

  static __device__ __forceinline__ void start(u32 tile, const Element* from, i64 row_stride, int first, int length,
                                               int thread) {
    const int row = row_of(thread), chunk = chunk_of(thread);
    if constexpr (regular) {
      u32 to[phases];
#pragma unroll
      for (int phase = 0; phase < phases; ++phase) to[phase] = tile + T::offset(row + phase * rows_a_pass, chunk);
      const i64 step = rows_a_pass * row_stride;
      if (first + T::rows <= length) {
#pragma unroll
        for (int i = 0; i < passes; ++i, from += step) {
          copy_async(to[i % phases] + i / phases * phases * rows_a_pass * T::row_bytes, from);
        }
      } else {
        const Element* const known = from;  // nothing is read of it where a row is not there
#pragma unroll 1
        for (int i = 0; i < passes; i += phases) {
#pragma unroll
          for (int phase = 0; phase < phases; ++phase, from += step) {
            const bool valid = first + row + (i + phase) * rows_a_pass < length;
            copy_async(to[phase] + i * rows_a_pass * T::row_bytes, valid ? from : known, valid);
          }
        }
      }
    } else {
      const Element* const known = from;
#pragma unroll
      for (int i = 0; i < Rows::passes; ++i, from += Rows::pass_rows * row_stride) {
        const int here = row + i * Rows::pass_rows;
        if (!Rows::in_tile(here)) break;
        const u32 to = tile + T::offset(here, chunk);
#pragma unroll
        for (int j = 0; j < Rows::row_chunks; ++j) {
          const int of_row = chunk + j * Rows::row_threads, limb = limbs == 1 ? 0 : of_row / limb_chunks;
          const bool valid = first + here < length && (filled == limb_chunks || of_row - limb * limb_chunks < filled);
          const Element* source = from + (j * Rows::row_threads - limb * (limb_chunks - filled)) * chunk_elements;
          copy_async(to + j * Rows::row_threads * 16, valid ? source : known, valid);
        }
      }
    }
  }
};

// The interface of the families for loads of tiles from global memory: `start` before an MMA loop, `finish` before the
// barrier that makes the tile visible to the block. Here cp.async copies, and there is nothing to finish but to wait.
template <typename T, int columns, int threads, bool short_code = false>
struct TileLoad {
  // What `start` takes for a head.
  static __device__ __forceinline__ const Element* base(const Element* head, i64 row_stride, int thread) {
    using Short = ShortLoad<T, columns, threads>;
    return short_code ? head + Short::row_of(thread) * row_stride + Short::chunk_of(thread) * chunk_elements : head;
  }
  template <bool whole = false>
  __device__ __forceinline__ void start(u32 tile, const Element* base, i64 row_stride, int first, int length,
                                        int thread) {
    if constexpr (short_code) {
      ShortLoad<T, columns, threads>::start(tile, base + first * row_stride, row_stride, first, length, thread);
    } else {
      load_tile<T, columns, threads>(tile, base, row_stride, first, length, thread);
    }
  }
  __device__ __forceinline__ void start_whole(u32 tile, const Element* head, i64 row_stride, int first, int length,
                                              int thread, bool wanted) {
    load_tile<T, columns, threads, true>(tile, head, row_stride, first, length, thread, wanted);
  }
  // Rows of a head that are listed.
  template <typename Listed>
  __device__ __forceinline__ void start_listed(u32 tile, const Listed& rows, const Element* head, i64 row_stride,
                                               int thread) {
    using Rows = ThreadRows<T, threads>;
    const int chunk = Rows::chunk_of(thread);
#pragma unroll
    for (int i = 0; i < Rows::passes; ++i) {
      const int row = Rows::row_of(thread) + i * Rows::pass_rows;
      if (!Rows::in_tile(row)) break;
      const Element* from = head + at_least(rows.numbers[i], 0) * row_stride;
#pragma unroll
      for (int j = 0; j < Rows::row_chunks; ++j) {
        const int of_row = chunk + j * Rows::row_threads;
        const bool valid = rows.numbers[i] >= 0 && of_row * chunk_elements < columns;
        copy_async(tile + T::offset(row, of_row), from + (valid ? of_row * chunk_elements : 0), valid);
      }
    }
  }
  __device__ __forceinline__ void finish(u32, int) const {}
};
struct FloatLoad {
  __device__ __forceinline__ void start(float* to, const float* from, bool valid) {
    copy_async_float(shared_address(to), from, valid);
  }
  __device__ __forceinline__ void finish(float*) const {}
};
constexpr bool loads_take_registers = false;
constexpr bool one_warp_loads = false;

using Mma = Products<Matrices<16>>;

// Two n8 tiles of every m16, in an order in which each product shares an operand with the one before: forward at
// head_dim 128 436 TFLOP/s in place of 430.
template <int m_tiles, typename To>
JAX_FLASH_DEVICE void multiply_in_turn(const To& to, const Matrix4 (&a)[m_tiles], const Matrix4& b) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) multiply_16bit(to(m)[0], a[m], b.x[0], b.x[1]);
#pragma unroll
  for (int m = m_tiles - 1; m >= 0; --m) multiply_16bit(to(m)[1], a[m], b.x[2], b.x[3]);
}

}  // namespace jax_flash
