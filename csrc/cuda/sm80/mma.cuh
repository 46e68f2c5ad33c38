// Ampere's instructions: cp.async, ldmatrix, mma.m16n8k16.
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

// Fragments of m16n8k16. Lane 4 * g + t holds, in pairs of adjacent columns:
//
//   A (16 x 16)                B (16 x 8), by columns     C (16 x 8), float
//   a0: row g,     k 2t        b0: k 2t,     column g     c0 c1: row g,     columns 2t, 2t + 1
//   a1: row g + 8, k 2t        b1: k 2t + 8, column g     c2 c3: row g + 8, columns 2t, 2t + 1
//   a2: row g,     k 2t + 8
//   a3: row g + 8, k 2t + 8
//
// so two neighbouring C fragments, rounded to 16 bits, are one A fragment: P needs no trip through shared memory.
struct FragmentA {
  u32 x[4];
};
struct FragmentB2 {  // of two neighbouring n8 tiles
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
JAX_FLASH_DEVICE void load_matrices_transposed(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

// The two ways in which the four 8 x 8 matrices of one ldmatrix can be spread over a 16 x 16 piece of a tile: which
// row, and which chunk of the pair, a lane addresses. `Tall`: rows first; `Wide`: chunks first.
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

JAX_FLASH_DEVICE void multiply(FragmentC& c, const FragmentA& a, u32 b0, u32 b1) {
  if constexpr (dtype == DType::bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
  }
}

// Two floats to two 16-bit elements, the first in the low half.
JAX_FLASH_DEVICE u32 pack(float low, float high) {
  u32 packed;
  if constexpr (dtype == DType::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

JAX_FLASH_DEVICE FragmentA as_operand(const FragmentC& left, const FragmentC& right) {
  return {{pack(left.x[0], left.x[1]), pack(left.x[2], left.x[3]), pack(right.x[0], right.x[1]),
           pack(right.x[2], right.x[3])}};
}

// Starts the copy of rows [first, first + T::rows) of one head into a tile; rows from `length` on become zeros, and so
// do the columns from head_dim on.
template <typename T, int columns, int threads>
JAX_FLASH_DEVICE void load_tile(u32 tile, const u16* head, i64 row_stride, int first, int length, int thread) {
  constexpr int filled = columns / 8;
  constexpr int pieces = T::rows * T::chunks;
  // Where a pass of all threads covers whole groups of 8 rows, each thread keeps its chunk and its swizzle: one pointer
  // moves on, and the shared addresses differ by constants.
  constexpr int rows_a_pass = threads / T::chunks;
  if constexpr (threads % T::chunks == 0 && rows_a_pass % 8 == 0 && pieces % threads == 0 && filled == T::chunks) {
    const int row = thread / T::chunks, chunk = thread % T::chunks;
    const u32 to = tile + T::offset(row, chunk);
    const u16* from = head + (first + row) * row_stride + chunk * 8;
    const i64 step = rows_a_pass * row_stride;
    if (first + T::rows <= length) {
#pragma unroll
      for (int i = 0; i < pieces / threads; ++i, from += step) copy_async(to + i * rows_a_pass * T::row_bytes, from);
    } else {
#pragma unroll
      for (int i = 0; i < pieces / threads; ++i, from += step) {
        const bool valid = first + row + i * rows_a_pass < length;
        copy_async(to + i * rows_a_pass * T::row_bytes, valid ? from : head, valid);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < ceil_div(pieces, threads); ++i) {
      const int piece = i * threads + thread;
      if (pieces % threads != 0 && piece >= pieces) break;
      const int row = piece / T::chunks, chunk = piece % T::chunks;
      const bool valid = first + row < length && chunk < filled;
      copy_async(tile + T::offset(row, chunk), valid ? head + (first + row) * row_stride + chunk * 8 : head, valid);
    }
  }
}

// Writes rows of a tile that these lanes' own warp has filled to global memory, 16 bytes a lane.
template <typename T, int columns, int rows>
JAX_FLASH_DEVICE void store_rows(const char* tile, int tile_row, u16* head, i64 row_stride, int first, int length,
                                 int lane) {
  constexpr int filled = columns / 8;
#pragma unroll
  for (int i = 0; i < ceil_div(rows * filled, 32); ++i) {
    const int piece = i * 32 + lane;
    const int row = piece / filled, chunk = piece % filled;
    if (row < rows && first + row < length) {
      *reinterpret_cast<uint4*>(head + (first + row) * row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + T::offset(tile_row + row, chunk));
    }
  }
}

// Puts accumulators of 16 rows, scaled per row half, into a tile: n8 tiles 2 * i and 2 * i + 1 are pair
// i * pair_step + first_pair of chunks.
template <typename T, int pair_step, int n>
JAX_FLASH_DEVICE void put_accumulators(char* tile, int tile_row, int first_pair, const FragmentC (&c)[n], float scale0,
                                       float scale1, int lane) {
  const int row = tile_row + lane / 4;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int chunk = 2 * (i / 2 * pair_step + first_pair) + i % 2;
    if (n / 2 * pair_step * 2 != T::chunks && chunk >= T::chunks) continue;
    char* to = tile + 4 * (lane % 4);
    *reinterpret_cast<u32*>(to + T::offset(row, chunk)) = pack(c[i].x[0] * scale0, c[i].x[1] * scale0);
    *reinterpret_cast<u32*>(to + T::offset(row + 8, chunk)) = pack(c[i].x[2] * scale1, c[i].x[3] * scale1);
  }
}

}  // namespace jax_flash
