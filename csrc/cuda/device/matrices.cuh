// MMAs of 16-bit elements where there is ldmatrix, from compute capability 7.5 on. The family's mma.cuh defines
// multiply_16bit() and pack().
#pragma once

#include "cuda/device/hardware_lanes.cuh"
#include "cuda/device/prelude.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/tile.cuh"
//
#include "cuda/device/lanes.cuh"
#include "cuda/device/products.cuh"

namespace jax_flash {

struct Matrix4 {
  u32 x[4];
};
JAX_FLASH_DEVICE void multiply_16bit(FragmentC& c, const Matrix4& a, u32 b0, u32 b1);
JAX_FLASH_DEVICE u32 pack(float low, float high);

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

// Fragments of m16n8k16, in pairs of adjacent k:
//
//   A (16 x 16)                B (16 x 8), by columns
//   a0: row g,     k 2t        b0: k 2t,     column g
//   a1: row g + 8, k 2t        b1: k 2t + 8, column g
//   a2: row g,     k 2t + 8
//   a3: row g + 8, k 2t + 8
//
// so two neighbouring accumulators, rounded to 16 bits, are one A fragment: P needs no trip through shared memory.
template <int steps>
struct Matrices {
  using FragmentA = Matrix4;
  using FragmentB = Matrix4;  // of two n8
  static constexpr int most_steps = steps;
  // Results pass through shared memory, for stores of 16 bytes, unless they are float32.
  static constexpr bool direct_stores = has_descale;

  // How the rows of a tile [m, k] or [n, k] are read.
  template <typename T>
  static __device__ __forceinline__ LaneReader<T> reader_a(u32 tile, int first_row, int lane) {
    return tall_reader<T>(tile, first_row, lane);
  }
  template <typename T>
  static __device__ __forceinline__ LaneReader<T> reader_b(u32 tile, int first_row, int lane) {
    return wide_reader<T>(tile, first_row, lane);
  }
  template <typename T>
  static __device__ __forceinline__ FragmentA load_a(const LaneReader<T>& reader, int row, int kk) {
    FragmentA a;
    load_matrices(a.x, reader.address(row, kk));
    return a;
  }
  template <typename T>
  static __device__ __forceinline__ FragmentB load_b(const LaneReader<T>& reader, int row, int kk) {
    return load_a(reader, row, kk);
  }

  // c[0] and c[1], of 8 columns each.
  static __device__ __forceinline__ void multiply(FragmentC* c, const FragmentA& a, const FragmentB& b) {
    multiply_16bit(c[0], a, b.x[0], b.x[1]);
    multiply_16bit(c[1], a, b.x[2], b.x[3]);
  }

  // How many columns of a tile [k, n] one load reads. The accumulators of a warp are whole groups of columns.
  static __host__ __device__ constexpr int group(int columns, int warps_that_share) { return 16; }

  // The column of a lane's first of the n-th accumulators of out.
  static __device__ __forceinline__ int out_column(int n, int lane) { return n * 8 + lane % 4 * 2; }

  // One lane's part in reading a tile [k, n] as B, from group `first_group` on.
  template <typename T, int group>
  struct ColumnReader {
    LaneReader<T> reader;
    int first_group;
    __device__ __forceinline__ ColumnReader(u32 tile, int lane, int first_group = 0)
        : reader(tall_reader<T>(tile, 0, lane, first_group)), first_group(first_group) {}
  };

  // 16 k of the n-th group of columns.
  template <typename T, int group>
  static __device__ __forceinline__ FragmentB load_columns(const ColumnReader<T, group>& y, int kk, int n) {
    FragmentB b;
    load_transposed(b.x, y.reader.address(16 * kk, n));
    return b;
  }

  // to(m) += A Y for a group of columns and 16 k, of limb `a_limb` of A and `y_limb` of Y.
  template <int m_tiles, typename To, typename A, typename T, int group>
  static __device__ __forceinline__ void multiply_group(const To& to, const A (&a)[m_tiles],
                                                        const ColumnReader<T, group>& y, int kk, int n, int a_limb,
                                                        int y_limb) {
    const FragmentB b = load_columns(y, kk, n + y_limb * (T::columns / limbs / group));
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) multiply(to(m), a[m].limb[a_limb], b);
  }

  // A of the accumulators of 16 columns.
  static __device__ __forceinline__ FragmentA fragment(const FragmentC& left, const FragmentC& right) {
    return {{pack(left.x[0], left.x[1]), pack(left.x[2], left.x[3]), pack(right.x[0], right.x[1]),
             pack(right.x[2], right.x[3])}};
  }

  // Accumulators of 16 rows into a tile, and A from it by its rows, or by its columns: of 16 columns, `first` + m.
  template <typename T, int n>
  static __device__ __forceinline__ void put(char* tile, int row, int column, const FragmentC (&c)[n], int lane) {
    put_accumulators<T, 1>(tile, row, column / 16, c, 1.f, 1.f, lane);
  }
  template <typename T>
  struct KeyReader {
    LaneReader<T> reader;
    __device__ __forceinline__ KeyReader(u32 tile, int row, int lane) : reader(tall_reader<T>(tile, row, lane)) {}
    __device__ __forceinline__ FragmentA operator()(int m, int kk) const { return load_a(reader, 16 * m, kk); }
  };
  template <typename T>
  struct RowReader {
    LaneReader<T> reader;
    __device__ __forceinline__ RowReader(u32 tile, int first, int lane)
        : reader(wide_reader<T>(tile, 0, lane, first)) {}
    __device__ __forceinline__ FragmentA operator()(int m, int kk) const {
      FragmentA a;
      load_transposed(a.x, reader.address(16 * kk, m));
      return a;
    }
  };

  static __device__ __forceinline__ void store_pair(float* to, float x, float y) {
    *reinterpret_cast<float2*>(to) = {x, y};
  }
  static __device__ __forceinline__ void store_pair(Element* to, float x, float y) {
    *reinterpret_cast<u32*>(to) = pack(x, y);
  }
  static __device__ __forceinline__ void store_pair(CommonSum* to, float x, float y) { add_pair(&to->sum, x, y); }

  // Writes accumulators of rows `row` and `row` + 8 of this lane to global memory, row r to `row_of(r)`: whole groups
  // of columns, every `step`-th from `first_group` on.
  template <int columns, int group, int step, typename To, int n, typename RowOf = SameRow>
  static __device__ __forceinline__ void store_fragments(const FragmentC (&c)[n], float scale0, float scale1, To* head,
                                                         i64 row_stride, int row, int length, int first_group, int lane,
                                                         const RowOf& row_of = {}) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int column = (i / 2 * step + first_group) * group + i % 2 * 8 + lane % 4 * 2;
      if (column >= columns) continue;
      const auto at = [&](int r) { return head + row_of(r) * row_stride + column; };
      if (row < length) store_pair(at(row), c[i].x[0] * scale0, c[i].x[1] * scale0);
      if (row + 8 < length) store_pair(at(row + 8), c[i].x[2] * scale1, c[i].x[3] * scale1);
    }
  }

  // Puts accumulators of 16 rows, scaled per row half, into a tile: n8 tiles 2 * i and 2 * i + 1 are pair
  // i * pair_step + first_pair of chunks.
  template <typename T, int pair_step, int n>
  static __device__ __forceinline__ void put_accumulators(char* tile, int tile_row, int first_pair,
                                                          const FragmentC (&c)[n], float scale0, float scale1,
                                                          int lane) {
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

  // Writes rows of a tile that these lanes' own warp has filled to global memory, 16 bytes a lane: row r to
  // `row_of(r)`.
  template <typename T, int columns, int rows, typename RowOf = SameRow>
  static __device__ __forceinline__ void store_rows(const char* tile, int tile_row, Result* head, i64 row_stride,
                                                    int first, int length, int lane, const RowOf& row_of = {}) {
    constexpr int filled = columns / 8;
#pragma unroll
    for (int i = 0; i < ceil_div(rows * filled, 32); ++i) {
      const int piece = i * 32 + lane;
      const int row = piece / filled, chunk = piece % filled;
      if (row < rows && first + row < length) {
        *reinterpret_cast<uint4*>(head + row_of(first + row) * row_stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(tile + T::offset(tile_row + row, chunk));
      }
    }
  }
};

}  // namespace jax_flash
