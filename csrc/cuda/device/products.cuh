// Products of tiles and accumulators out of a family's instructions.
//
// float32 at float32's accuracy comes as arrays of two float16 limbs, x = high + low, which a tile holds side by side.
// Three products make one: high x high, low x high and high x low. Tensor cores cut off when they add, and all errors
// have one sign: so of the main terms only some are added up in a row and then, by float32 additions, to the rest, and
// the small ones apart from them.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// `Family` has fragments and loads: see sm70/mma.cuh and device/matrices.cuh.
template <typename Family>
struct Products : Family {
  using FragmentA = typename Family::FragmentA;
  using FragmentB = typename Family::FragmentB;
  static constexpr int depth = 16;  // of k, in one step

  // Steps whose terms are added up in a row.
  static constexpr int most_steps = limbs == 2 ? 4 : Family::most_steps;

  struct OperandA {
    FragmentA limb[limbs];
  };

  // Volatile, so that it stays where it stands: the compiler would put all of them off to the end of a product, with
  // the sums of all groups of columns in registers till then (backward at head_dim 256: spills of 4004 bytes, not 792).
  static __device__ __forceinline__ void add(FragmentC& to, const FragmentC& c) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("add.f32 %0, %0, %1;" : "+f"(to.x[e]) : "f"(c.x[e]));
  }

  // c = X Y^T, of a tile [m, k] and a tile [n, k]; c is zero before.
  template <int k, int most_unrolled = 16, int m_tiles, int n_tiles, template <typename> class Reader, typename X,
            typename Y>
  static __device__ __forceinline__ void multiply_rows(FragmentC (&c)[m_tiles][n_tiles], const Reader<X>& x,
                                                       const Reader<Y>& y) {
    constexpr int steps = ceil_div(k, depth), x_limb = X::columns / limbs / depth, y_limb = Y::columns / limbs / depth;
    constexpr bool directly = limbs == 1 && steps <= most_steps;
    // Unrolled whole, the assembler reads so much ahead that it spills (sm_75, head_dim 256: 264 bytes).
    constexpr int unrolled = at_most(most_unrolled, limbs == 1 && steps % most_steps == 0 ? most_steps : steps);
    FragmentC sum[directly ? 1 : m_tiles][n_tiles] = {}, low[limbs == 1 ? 1 : m_tiles][n_tiles] = {};
#pragma unroll unrolled
    for (int kk = 0; kk < steps; ++kk) {
      OperandA a[m_tiles];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int p = 0; p < limbs; ++p) a[m].limb[p] = Family::load_a(x, 16 * m, kk + p * x_limb);
      }
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
        FragmentB b[limbs];
#pragma unroll
        for (int p = 0; p < limbs; ++p) b[p] = Family::load_b(y, 8 * n, kk + p * y_limb);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
          FragmentC* to = directly ? &c[m][n] : &sum[directly ? 0 : m][n];
          if constexpr (limbs == 2) {
            Family::multiply(&low[m][n], a[m].limb[1], b[0]);
            Family::multiply(&low[m][n], a[m].limb[0], b[1]);
          }
          Family::multiply(to, a[m].limb[0], b[0]);
        }
      }
      if constexpr (!directly) {
        if (kk == steps - 1 || kk % most_steps == most_steps - 1) {
#pragma unroll
          for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
            for (int n = 0; n < n_tiles; ++n) {
              add(c[m][n], sum[m][n]);
              sum[m][n] = {};
              if constexpr (limbs == 2) {
                if (kk == steps - 1) add(c[m][n], low[m][n]);
              }
            }
          }
        }
      }
    }
  }

  // c += A Y, of A in fragments and a tile [k, n]. `a(m, kk)` returns the operand of rows 16 * m and k depth * kk. A
  // warp takes every `step`-th group of columns.
  template <int k, int step = 1, int m_tiles, int n_tiles, typename A, template <typename, int> class Reader,
            typename T, int group>
  static __device__ __forceinline__ void multiply_columns(FragmentC (&c)[m_tiles][n_tiles], const A& a_of,
                                                          const Reader<T, group>& y) {
    constexpr int groups = T::columns / limbs / group, own_groups = n_tiles * 8 / group, wide = group / 8;
    constexpr int steps = k / depth;
    if constexpr (limbs == 1) {
#pragma unroll
      for (int kk = 0; kk < steps; ++kk) {
        OperandA a[m_tiles];
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) a[m] = a_of(m, kk);
#pragma unroll
        for (int n = 0; n < own_groups; ++n) {
          if (own_groups * step != groups && n * step + y.first_group >= groups) continue;
          Family::template multiply_group<m_tiles>([&](int m) { return &c[m][n * wide]; }, a, y, kk, n * step, 0, 0);
        }
      }
    } else {
      OperandA a[steps][m_tiles];
#pragma unroll
      for (int kk = 0; kk < steps; ++kk) {
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) a[kk][m] = a_of(m, kk);
      }
#pragma unroll
      for (int n = 0; n < own_groups; ++n) {
        if (own_groups * step != groups && n * step + y.first_group >= groups) continue;
        FragmentC high[m_tiles][wide] = {}, low[m_tiles][wide] = {};
#pragma unroll
        for (int kk = 0; kk < steps; ++kk) {
          auto to_low = [&](int m) { return &low[m][0]; };
          Family::template multiply_group<m_tiles>(to_low, a[kk], y, kk, n * step, 1, 0);
          Family::template multiply_group<m_tiles>(to_low, a[kk], y, kk, n * step, 0, 1);
          Family::template multiply_group<m_tiles>([&](int m) { return &high[m][0]; }, a[kk], y, kk, n * step, 0, 0);
        }
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
          for (int j = 0; j < wide; ++j) {
            add(high[m][j], low[m][j]);
            add(c[m][n * wide + j], high[m][j]);
          }
        }
      }
    }
  }

  // The operand of k depth * kk of accumulators.
  template <int n>
  static __device__ __forceinline__ OperandA operand(const FragmentC (&c)[n], int kk) {
    OperandA a;
    a.limb[0] = Family::fragment(c[2 * kk], c[2 * kk + 1]);
    if constexpr (limbs == 2) a.limb[1] = Family::fragment(low_limb(c[2 * kk]), low_limb(c[2 * kk + 1]));
    return a;
  }

  // What float16 leaves of accumulators.
  static __device__ __forceinline__ FragmentC low_limb(const FragmentC& c) {
    FragmentC low;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float high;
      asm("{.reg .b16 x; cvt.rn.f16.f32 x, %1; cvt.f32.f16 %0, x;}" : "=f"(high) : "f"(c.x[e]));
      low.x[e] = c.x[e] - high;
    }
    return low;
  }

  // P^T or dS^T of a block, in shared memory.
  template <int keys, int rows>
  struct Scores {
    using T = Tile<keys, limbs * rows>;
    static constexpr int bytes = T::bytes;

    // The accumulators of 16 keys and of the rows from `row` on.
    template <int n>
    static __device__ __forceinline__ void put(char* tile, int key, int row, const FragmentC (&c)[n], int lane) {
      Family::template put<T>(tile, key, row, c, lane);
      if constexpr (limbs == 2) {
        FragmentC low[n];
#pragma unroll
        for (int i = 0; i < n; ++i) low[i] = low_limb(c[i]);
        Family::template put<T>(tile, key, rows + row, low, lane);
      }
    }

    // Reads [keys, rows] as A.
    struct ByKey {
      typename Family::template KeyReader<T> reader;
      __device__ __forceinline__ ByKey(const char* tile, int key, int lane) : reader(shared_address(tile), key, lane) {}
      __device__ __forceinline__ OperandA operator()(int m, int kk) const {
        OperandA a;
#pragma unroll
        for (int p = 0; p < limbs; ++p) a.limb[p] = reader(m, kk + p * (rows / depth));
        return a;
      }
    };

    // Reads [rows, keys] as A: of the 16 rows `first` + m * `step`, counted in 16. Of one limb.
    template <int step>
    struct ByRow {
      typename Family::template RowReader<T> reader;
      __device__ __forceinline__ ByRow(const char* tile, int first, int lane)
          : reader(shared_address(tile), first, lane) {}
      __device__ __forceinline__ OperandA operator()(int m, int kk) const { return {{reader(m * step, kk)}}; }
    };
  };
};

}  // namespace jax_flash
