// Ampere's instructions: cp.async, ldmatrix, mma. `Mma`, at the end, has what differs between element types.
#pragma once

#include "cuda/shared/prelude.cuh"
#include "cuda/shared/tile.cuh"

namespace jax_flash {

// Copies 16 bytes from global to shared memory, or writes 16 zeros.
JAX_FLASH_DEVICE void copy_async(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
JAX_FLASH_DEVICE void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
JAX_FLASH_DEVICE void copy_async_float(u32 to, const float* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
JAX_FLASH_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` committed groups of this thread are under way.
template <int pending>
JAX_FLASH_DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Operands and accumulators of an mma instruction of 16 rows and 8 columns, as a lane holds them. Lane 4 * g + t has of
// an accumulator c0 c1: row g, columns 2t and 2t + 1; c2 c3: row g + 8, the same columns. For the operands see below.
struct FragmentA {
  u32 x[4];
};
struct FragmentC {
  float x[4];
};

JAX_FLASH_DEVICE void load_matrices(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

// The two ways in which the four 8 x 8 matrices of one ldmatrix can be spread over a piece of 16 rows and two chunks of
// a tile: which row, and which chunk of the pair, a lane addresses. `Tall`: rows first; `Wide`: chunks first.
//
//   tile holds           operand          load          order
//   [m, k]               A                plain         Tall
//   [k, m]               A                transposed    Wide
//   [n, k]               B of two n8      plain         Wide
//   [k, n]               B of two n8      transposed    Tall
// `first_pair`, below 4, shifts all reads by so many pairs of chunks: warps that share the columns of a tile take
// pairs in turn, so that the shift stays an exclusive or.
template <typename T>
JAX_FLASH_DEVICE LaneReader<T> tall_reader(u32 tile, int first_row, int lane, int first_pair = 0) {
  return LaneReader<T>(tile, first_row + (lane & 15), 2 * first_pair + (lane >> 4));
}
template <typename T>
JAX_FLASH_DEVICE LaneReader<T> wide_reader(u32 tile, int first_row, int lane, int first_pair = 0) {
  return LaneReader<T>(tile, first_row + (lane & 7) + (lane >> 4 << 3), 2 * first_pair + (lane >> 3 & 1));
}

// Starts the copy of rows [first, first + T::rows) of one head into a tile; rows from `length` on become zeros, and so
// do the columns from `columns` on.
template <typename T, int columns, int threads>
JAX_FLASH_DEVICE void load_tile(u32 tile, const Element* head, i64 row_stride, int first, int length, int thread) {
  constexpr int filled = columns / chunk_elements;
  constexpr int pieces = T::rows * T::chunks;
  // Where a pass of all threads covers whole rows, each thread keeps its chunk, and its swizzle changes with the row
  // modulo 8 alone: one pointer moves on, and shared addresses of the same phase differ by constants.
  constexpr int rows_a_pass = threads / T::chunks;
  constexpr bool regular = threads % T::chunks == 0 && (rows_a_pass % 8 == 0 || 8 % rows_a_pass == 0);
  if constexpr (regular && pieces % threads == 0 && filled == T::chunks) {
    constexpr int phases = rows_a_pass % 8 == 0 ? 1 : 8 / rows_a_pass;
    const int row = thread / T::chunks, chunk = thread % T::chunks;
    u32 to[phases];
#pragma unroll
    for (int phase = 0; phase < phases; ++phase) to[phase] = tile + T::offset(row + phase * rows_a_pass, chunk);
    const Element* from = head + (first + row) * row_stride + chunk * chunk_elements;
    const i64 step = rows_a_pass * row_stride;
    if (first + T::rows <= length) {
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
  } else {
#pragma unroll
    for (int i = 0; i < ceil_div(pieces, threads); ++i) {
      const int piece = i * threads + thread;
      if (pieces % threads != 0 && piece >= pieces) break;
      const int row = piece / T::chunks, chunk = piece % T::chunks;
      const bool valid = first + row < length && chunk < filled;
      const Element* from = head + (first + row) * row_stride + chunk * chunk_elements;
      copy_async(tile + T::offset(row, chunk), valid ? from : head, valid);
    }
  }
}

}  // namespace jax_flash

#include "cuda/sm80/mma_16bit.cuh"
#include "cuda/sm80/mma_f32.cuh"

namespace jax_flash {

using Mma = Select<dtype == DType::f32, MmaF32, Mma16Bit>::type;

}  // namespace jax_flash
