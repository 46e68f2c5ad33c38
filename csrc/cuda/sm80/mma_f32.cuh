// Products of float32 at float32's accuracy: mma.m16n8k8 on TF32 operands, which reads 19 bits of each float and leaves
// off the rest, of every number split into a sum of two.
#pragma once

#include "cuda/shared/prelude.cuh"
#include "cuda/shared/tile.cuh"

namespace jax_flash {

// Fragments of m16n8k8, one float each:
//
//   A (16 x 8)                 B (8 x 8), by columns
//   a0: row g,     k t         b0: k t,     column g
//   a1: row g + 8, k t         b1: k t + 4, column g
//   a2: row g,     k t + 4
//   a3: row g + 8, k t + 4
//
// An 8 x 4 piece of floats is an 8 x 8 piece of 16-bit elements, so ldmatrix brings A from a tile [m, k] and B from a
// tile [n, k] as it does for those. The sum runs over k in any order as long as A and B agree on it. Where A comes from
// accumulators, k = t stands for row 2t of the tile [k, n] that B comes from, and k = t + 4 for row 2t + 1: so an
// accumulator is a fragment as it is, a0..a3 = c0, c2, c1, c3. B is then two rows of a tile, of which a lane reads
// adjacent columns, 4 (or 2) at a time: column g of n8 tile j of a group stands for column 4g + j (or 2g + j) of the
// group's 32 (or 16). The lanes of one phase of such a load hit different banks, as those of an ldmatrix do.
struct MmaF32 {
  static constexpr int depth = 8;              // of k, in one instruction
  static constexpr bool direct_stores = true;  // a lane's accumulators are 16 adjacent bytes of the result
  static constexpr bool precise = true;
  static constexpr int kMainTerms = 8;
  static constexpr float kNearest = 1.00034f;  // 1 + 2^-11 / (the mean of mantissas, 1 / ln 2)

  template <typename T>
  static __device__ __forceinline__ LaneReader<T> reader_a(u32 tile, int first_row, int lane) {
    return tall_reader<T>(tile, first_row, lane);
  }
  template <typename T>
  static __device__ __forceinline__ LaneReader<T> reader_b(u32 tile, int first_row, int lane) {
    return wide_reader<T>(tile, first_row, lane);
  }

  // How many columns of a tile [k, n] one load brings. The accumulators of a warp are whole groups of columns.
  static __host__ __device__ constexpr int group(int columns, int warps_that_share) {
    return columns % (32 * warps_that_share) == 0 ? 32 : 16;
  }

  // Operands, split into sums of two that TF32 can say.
  template <int n>
  struct Operand {
    u32 high[n];
    u32 low[n];
  };

  template <int n>
  static __device__ __forceinline__ Operand<n> prepare(const u32 (&x)[n]) {
    Operand<n> operand;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      // A product that adds about half a unit of the last place rounds, where the mask alone would cut off, and lets
      // infinities, NaNs and what TF32 can say exactly be.
      operand.high[i] = __float_as_uint(__uint_as_float(x[i]) * kNearest) & 0xffffe000;
      operand.low[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(operand.high[i]));
    }
    return operand;
  }

  static __device__ __forceinline__ void load_two_matrices(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address));
  }

  // c += A B, or c = A B.
  static __device__ __forceinline__ void multiply(FragmentC& c, const u32 (&a)[4], u32 b0, u32 b1, bool fresh) {
    if (fresh) {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%10, %10, %10, %10};"
          : "=f"(c.x[0]), "=f"(c.x[1]), "=f"(c.x[2]), "=f"(c.x[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }

  // Sums of products that have float32's accuracy: the main terms apart from the small ones, and of the main terms
  // only kMainTerms in a row, then added to the rest by float32 additions: tensor cores cut off when they add, and all
  // errors have one sign.
  struct Sum {
    FragmentC high, low;

    template <int elements>
    __device__ __forceinline__ void add(const Operand<4>& a, const Operand<elements>& b, int n, bool fresh_high,
                                        bool fresh_low) {
      multiply(low, a.low, b.high[2 * n], b.high[2 * n + 1], fresh_low);
      multiply(low, a.high, b.low[2 * n], b.low[2 * n + 1], false);
      multiply(high, a.high, b.high[2 * n], b.high[2 * n + 1], fresh_high);
    }
  };

  // Volatile, so that it stays where it stands: the compiler would put all of them off to the end of a product, with
  // the sums of all groups of columns in registers till then (backward at head_dim 256: spills of 4004 bytes, not 792).
  static __device__ __forceinline__ void add(FragmentC& to, const FragmentC& c) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("add.f32 %0, %0, %1;" : "+f"(to.x[e]) : "f"(c.x[e]));
  }

  // c = X Y^T, of a tile [m, k] and a tile [n, k]; c is zero before.
  template <int k, int m_tiles, int n_tiles, typename X, typename Y>
  static __device__ __forceinline__ void multiply_rows(FragmentC (&c)[m_tiles][n_tiles], const LaneReader<X>& x,
                                                       const LaneReader<Y>& y) {
    Sum sum[m_tiles][n_tiles];
#pragma unroll
    for (int kk = 0; kk < k / depth; ++kk) {
      Operand<4> a[m_tiles];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        u32 raw[4];
        load_matrices(raw, x.address(16 * m, kk));
        a[m] = prepare(raw);
      }
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
        u32 raw[4] = {};
        if (n + 1 < n_tiles) {
          load_matrices(raw, y.address(8 * n, kk));
        } else {
          load_two_matrices(raw, y.address(8 * n, kk));
        }
        const Operand<4> b = prepare(raw);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
          for (int i = 0; i < at_most(2, n_tiles - n); ++i) {
            sum[m][n + i].add(a[m], b, i, kk % kMainTerms == 0, kk == 0);
          }
        }
      }
      const bool last = kk == k / depth - 1;
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
          if (last) add(sum[m][n].high, sum[m][n].low);
          if (last && kk < kMainTerms) {
            c[m][n] = sum[m][n].high;
          } else if (last || kk % kMainTerms == kMainTerms - 1) {
            add(c[m][n], sum[m][n].high);
          }
        }
      }
    }
  }

  // One lane's part in reading a tile [k, n] as B, from group `first_group` on. A step of k is 8 rows, so the swizzle
  // of the lane's two rows never changes.
  template <typename T, int group>
  struct ColumnReader {
    static constexpr int elements = group / 8;  // that a lane reads of a row
    u32 first[2];
    int first_group;

    __device__ __forceinline__ ColumnReader(u32 tile, int lane, int first_group = 0) : first_group(first_group) {
      const int column = first_group * group + lane / 4 * elements;
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        first[odd] = tile + T::offset(lane % 4 * 2 + odd, column / 4) + column % 4 * 4;
      }
    }

    // `kk` and `n`, in groups from the first on, are constants; n is even where the first group may not be.
    __device__ __forceinline__ void load(u32 (&x)[2 * elements], int kk, int n) const {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        u32 address = first[odd];
        if constexpr (T::swizzled && group == 16) {
          address = (address ^ (n % 2 * 64)) + n / 2 * 128;
        } else {
          address += n * group * 4;
        }
        address += kk * 8 * T::row_bytes;
        if constexpr (elements == 4) {
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(x[odd]), "=r"(x[2 + odd]), "=r"(x[4 + odd]), "=r"(x[6 + odd])
                       : "r"(address));
        } else {
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[odd]), "=r"(x[2 + odd]) : "r"(address));
        }
      }
    }
  };

  // c += A Y, of A in fragments and a tile [k, n]. `a(m, kk)` returns the fragment of rows 16 * m and k depth * kk. A
  // warp takes every `step`-th group of columns.
  template <int k, int step = 1, int m_tiles, int n_tiles, typename A, typename T, int group>
  static __device__ __forceinline__ void multiply_columns(FragmentC (&c)[m_tiles][n_tiles], const A& a_of,
                                                          const ColumnReader<T, group>& y) {
    constexpr int groups = T::columns / group, own_groups = n_tiles * 8 / group, wide = group / 8;
#pragma unroll
    for (int n = 0; n < own_groups; ++n) {
      if (own_groups * step != groups && n * step + y.first_group >= groups) continue;
      Sum sum[m_tiles][wide];
#pragma unroll
      for (int kk = 0; kk < k / depth; ++kk) {
        u32 raw[2 * wide];
        y.load(raw, kk, n * step);
        const Operand<2 * wide> b = prepare(raw);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          const Operand<4> a = prepare(a_of(m, kk).x);
#pragma unroll
          for (int j = 0; j < wide; ++j) sum[m][j].add(a, b, j, kk == 0, kk == 0);
        }
      }
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int j = 0; j < wide; ++j) {
          add(sum[m][j].high, sum[m][j].low);
          add(c[m][n * wide + j], sum[m][j].high);
        }
      }
    }
  }

  // The fragment A of k depth * kk of accumulators.
  template <int n>
  static __device__ __forceinline__ FragmentA operand(const FragmentC (&c)[n], int kk) {
    return {{__float_as_uint(c[kk].x[0]), __float_as_uint(c[kk].x[2]), __float_as_uint(c[kk].x[1]),
             __float_as_uint(c[kk].x[3])}};
  }

  // P or dS of a block, in shared memory: [rows, keys], where within 8 keys key 2t is column t and key 2t + 1 column
  // t + 4. So the accumulators of P^T can be written, and read again as A [keys, rows], without conflicts of banks, and
  // ldmatrix brings A [rows, keys] in the order that goes with ColumnReader.
  template <int keys, int rows>
  struct Scores {
    using T = Tile<rows, keys>;
    static constexpr int bytes = T::bytes;

    // A lane's address of the accumulator c0, c1, c2 or c3 of 16 keys and 8 rows.
    struct Places {
      u32 first[4];
      __device__ __forceinline__ Places(const char* tile, int key, int row, int lane) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int chunk = key / 4 + e / 2 * 2 + lane / 4 % 2;
          first[e] = shared_address(tile) + T::offset(row + lane % 4 * 2 + e % 2, chunk) + lane / 8 * 4;
        }
      }
      __device__ __forceinline__ u32 address(int e, int row) const { return first[e] + row * T::row_bytes; }
    };

    // The accumulators of 16 keys and of the rows from `row` on.
    template <int n>
    static __device__ __forceinline__ void put(char* tile, int key, int row, const FragmentC (&c)[n], int lane) {
      const Places places(tile, key, row, lane);
#pragma unroll
      for (int i = 0; i < n; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(places.address(e, 8 * i)), "f"(c[i].x[e]) : "memory");
        }
      }
    }

    // Reads [keys, rows] as A.
    struct ByKey {
      Places places;
      __device__ __forceinline__ ByKey(const char* tile, int key, int lane) : places(tile, key, 0, lane) {}
      __device__ __forceinline__ FragmentA operator()(int m, int kk) const {
        FragmentA a;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(a.x[e / 2 + e % 2 * 2]) : "r"(places.address(e, 8 * kk)));
        }
        return a;
      }
    };

    // Reads [rows, keys] as A: of the 16 rows `first` + m * `step`, counted in 16.
    template <int step>
    struct ByRow {
      LaneReader<T> reader;
      __device__ __forceinline__ ByRow(const char* tile, int first, int lane)
          : reader(tall_reader<T>(shared_address(tile), 16 * first, lane)) {}
      __device__ __forceinline__ FragmentA operator()(int m, int kk) const {
        FragmentA a;
        load_matrices(a.x, reader.address(16 * m * step, kk));
        return a;
      }
    };
  };

  // Writes accumulators of rows `row` and `row` + 8 of this lane to global memory: whole groups of columns, every
  // `step`-th from `first_group` on.
  template <int columns, int group, int step, int n>
  static __device__ __forceinline__ void store_fragments(const FragmentC (&c)[n], float scale0, float scale1,
                                                         Result* head, i64 row_stride, int row, int length,
                                                         int first_group, int lane) {
    constexpr int wide = group / 8;
#pragma unroll
    for (int i = 0; i < n / wide; ++i) {
      const FragmentC* of = &c[i * wide];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = half ? scale1 : scale0;
        const int e = 2 * half;
        const int column = (i * step + first_group) * group + lane % 4 * 2 * wide;
        if (column >= columns || row + 8 * half >= length) continue;
        float4* to = reinterpret_cast<float4*>(head + (row + 8 * half) * row_stride + column);
        if constexpr (wide == 4) {
          to[0] = {of[0].x[e] * scale, of[1].x[e] * scale, of[2].x[e] * scale, of[3].x[e] * scale};
          to[1] = {of[0].x[e + 1] * scale, of[1].x[e + 1] * scale, of[2].x[e + 1] * scale, of[3].x[e + 1] * scale};
        } else {
          to[0] = {of[0].x[e] * scale, of[1].x[e] * scale, of[0].x[e + 1] * scale, of[1].x[e + 1] * scale};
        }
      }
    }
  }
};

}  // namespace jax_flash
