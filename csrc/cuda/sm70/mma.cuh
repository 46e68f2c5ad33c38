// Volta's instruction: mma.m8n8k4, for float16 alone, four of them at a time in the four quad pairs of a warp.
//
// The quad pair of a lane is its bits 2 and 3, its place in there bits 0, 1 and 4. The pairs make a 16 x 16 piece of
// accumulators, two by two: bit 2 halves the rows, bit 3 the columns. Which row or column of the piece an instruction's
// own row or column stands for is free, as long as accumulators and operands agree; here so that every lane holds what
// FragmentC says (lanes.cuh): with the bits of g and t
//
//   lane bit    0    1    2    3    4
//               g0   t0   g2   t1   g1
//
// an instruction's row has bits g0, half, g1, its column odd, t0, n (which of two n8 tiles), and the quad pair adds g2
// and t1. As operands, lane 4 * g + t has of A: row g + 8 * t0, four k at a time; of B from a tile [n, k]: the row g0 +
// 2 * t0 + 4 * t1 + 8 * g1 of 16, four k at a time; of B from a tile [k, n]: of four k the one g0 + 2 * t0, and columns
// of which it needs any four that no other lane with the same g0, t0 has. It reads eight that are a chunk, and takes
// four as those of one n8 tile and four as those of the next.
#pragma once

namespace jax_flash {
constexpr int column_step = 32;
}

#include "cuda/device/prelude.cuh"
#include "cuda/device/shared_memory.cuh"

namespace jax_flash {

static_assert(dtype == DType::f16, "other dtypes come as float16 with descale");

struct Lanes {
  static __device__ __forceinline__ constexpr int of(int thread) {
    const int g = (thread & 1) | (thread >> 3 & 2) | (thread & 4), t = (thread >> 1 & 1) | (thread >> 2 & 2);
    return 4 * g + t;
  }
  // The hardware's number of a lane.
  static __device__ __forceinline__ constexpr int thread_of(int lane) {
    const int g = lane / 4, t = lane % 4;
    return (g & 1) | (t & 1) << 1 | (g & 4) | (t & 2) << 2 | (g & 2) << 3;
  }
  static __device__ __forceinline__ float from_further(float x, int lane, int further) {
    return __shfl_sync(0xffffffffu, x, thread_of((lane + further) % 32));
  }
  static __device__ __forceinline__ constexpr int in_row(int i) { return 2 << 2 * i; }  // 2 8
  static __device__ __forceinline__ constexpr int in_column(int i) { return i == 0 ? 1 : i == 1 ? 16 : 4; }
};

__device__ constexpr bool lanes_are_those_of_threads() {
  for (int lane = 0; lane < 32; ++lane) {
    if (Lanes::of(Lanes::thread_of(lane)) != lane) return false;
  }
  return true;
}
static_assert(lanes_are_those_of_threads(), "one number is the inverse of the other");

// A tile of elements in shared memory, in chunks of 16 bytes. The eight lanes that a load of 16 bytes serves at once
// read one chunk of rows r0 + {0, 1, 4, 5, 8, 9, 12, 13} (A), or of rows r0 + {0, 1, 2, 3} twice (B); a store of scores
// writes 4 bytes into one chunk of eight neighbour rows in each of four lanes. `phase`, which is added to the number of
// the chunk without carry, spreads all of these over all banks. Rows have whole 64 bytes; where they have whole 128,
// eight chunks change places, else four, and the neighbour row lies in the other half of the banks.
template <int rows_, int columns_>
struct Tile {
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int chunks = columns / chunk_elements;
  static constexpr bool whole_lines = chunks % 8 == 0;
  static constexpr int row_bytes = 16 * chunks;
  static constexpr int bytes = rows * row_bytes;
  static_assert(columns % 32 == 0 && rows % 16 == 0, "a tile is made of whole 16 x 32 pieces");

  static __device__ __forceinline__ int phase(int row) {
    return whole_lines ? (row & 7) ^ (row >> 2 & 2) : (row >> 2 & 1) | ((row ^ row >> 2) & 2);
  }
  static __device__ __forceinline__ u32 offset(int row, int chunk) {
    return row * row_bytes + 16 * (chunk ^ phase(row));
  }
};

// One lane's part in reading a tile by rows. The row moves in steps of 16, so its phase never changes: chunks are an
// exclusive or away within a line, and an immediate offset beyond it and for other rows. Tiles start on such lines.
template <typename T>
struct LaneReader {
  static constexpr int together = T::whole_lines ? 8 : 4;  // chunks that change places
  u32 first;

  // Of the chunk `own` on, whose bits meet none of those asked for, or of chunk 0.
  __device__ __forceinline__ LaneReader(u32 tile, int row, int own = 0) : first(tile + T::offset(row, own)) {}

  // All constants; `row` in steps of 16, or of 8 with a `turn` of 2 for the one of eight.
  __device__ __forceinline__ u32 address(int row, int chunk, int turn = 0) const {
    return (first ^ (chunk % together ^ turn) * 16) + chunk / together * together * 16 + row * T::row_bytes;
  }
};

}  // namespace jax_flash

#include "cuda/device/lanes.cuh"
#include "cuda/device/products.cuh"
#include "cuda/device/register_loads.cuh"

namespace jax_flash {

// Accumulators of a 16 x 16 piece: two neighbouring FragmentC.
template <bool b_by_rows>  // whether B comes from a tile [k, n]
JAX_FLASH_DEVICE void multiply_884(FragmentC& c0, FragmentC& c1, u32 a0, u32 a1, u32 b0, u32 b1) {
  if constexpr (b_by_rows) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(c0.x[0]), "+f"(c0.x[1]), "+f"(c0.x[2]), "+f"(c0.x[3]), "+f"(c1.x[0]), "+f"(c1.x[1]), "+f"(c1.x[2]),
          "+f"(c1.x[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(c0.x[0]), "+f"(c0.x[1]), "+f"(c0.x[2]), "+f"(c0.x[3]), "+f"(c1.x[0]), "+f"(c1.x[1]), "+f"(c1.x[2]),
          "+f"(c1.x[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
  }
}

struct QuadPairs {
  // Of 16 k, in steps of four: two registers each.
  struct FragmentA {
    u32 x[8];
  };
  using FragmentB = FragmentA;
  static constexpr int most_steps = 16;
  static constexpr bool direct_stores = true;

  // How many columns of a tile [k, n] one load reads.
  static __host__ __device__ constexpr int group(int columns, int warps_that_share) { return 32; }

  template <typename T>
  static __device__ __forceinline__ LaneReader<T> reader_a(u32 tile, int first_row, int lane) {
    return LaneReader<T>(tile, first_row + lane / 4 + lane % 2 * 8);
  }
  template <typename T>
  static __device__ __forceinline__ LaneReader<T> reader_b(u32 tile, int first_row, int lane) {
    return LaneReader<T>(tile, first_row + lane / 4 % 2 + lane % 4 * 2 + lane / 8 % 2 * 8);
  }

  // 16 k of a lane's row.
  template <typename T>
  static __device__ __forceinline__ FragmentA load_a(const LaneReader<T>& reader, int row, int kk) {
    FragmentA a;
#pragma unroll
    for (int i = 0; i < 2; ++i) load_shared(*reinterpret_cast<u32(*)[4]>(&a.x[4 * i]), reader.address(row, 2 * kk + i));
    return a;
  }
  template <typename T>
  static __device__ __forceinline__ FragmentB load_b(const LaneReader<T>& reader, int row, int kk) {
    return load_a(reader, row, kk);
  }

  // c[0] and c[1], a 16 x 16 piece.
  static __device__ __forceinline__ void multiply(FragmentC* c, const FragmentA& a, const FragmentB& b) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) multiply_884<false>(c[0], c[1], a.x[i], a.x[i + 1], b.x[i], b.x[i + 1]);
  }

  // The column of a lane's first of the n-th accumulators of out.
  static __device__ __forceinline__ int out_column(int n, int lane) {
    return n / 4 * 32 + lane / 2 % 2 * 16 + n % 2 * 8 + n / 2 % 2 * 4 + lane % 2 * 2;
  }

  // One lane's part in reading a tile [k, n] as B, in groups of 32 columns, from group `first_group`, 0 or 1, on. The
  // order of k is that of `operand`: of eight rows, the quad pairs with t1 take the second four first.
  template <typename T, int group>
  struct ColumnReader {
    LaneReader<T> first, second;  // four rows
    int first_group;

    static __device__ __forceinline__ LaneReader<T> reader(u32 tile, int lane, int first_group, int four) {
      const int t1 = lane / 2 % 2;
      return LaneReader<T>(tile + (T::whole_lines ? 0 : 64 * first_group),
                           (four ^ t1) * 4 + lane / 4 % 2 + lane % 2 * 2,
                           t1 * 2 + lane / 8 % 2 + (T::whole_lines ? 4 * first_group : 0));
    }
    __device__ __forceinline__ ColumnReader(u32 tile, int lane, int first_group = 0)
        : first(reader(tile, lane, first_group, 0)),
          second(reader(tile, lane, first_group, 1)),
          first_group(first_group) {}

    // Step `step` of the four that `kk` counts 16 rows for, columns from chunk `chunk` on, all constants.
    __device__ __forceinline__ void load(u32 (&x)[4], int kk, int step, int chunk) const {
      const int eight = step / 2;
      load_shared(x, (step % 2 ? second : first).address(16 * kk + 8 * eight, chunk, 2 * eight));
    }
  };

  // to(m) += A Y for a group of columns and 16 k, of limb `a_limb` of A and `y_limb` of Y.
  template <int m_tiles, typename To, typename A, typename T, int group>
  static __device__ __forceinline__ void multiply_group(const To& to, const A (&a)[m_tiles],
                                                        const ColumnReader<T, group>& y, int kk, int n, int a_limb,
                                                        int y_limb) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 b[4];
      y.load(b, kk, step, 4 * n + y_limb * (T::chunks / limbs));
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        FragmentC* c = to(m);
        const u32 a0 = a[m].limb[a_limb].x[2 * step], a1 = a[m].limb[a_limb].x[2 * step + 1];
        multiply_884<true>(c[0], c[1], a0, a1, b[0], b[1]);
        multiply_884<true>(c[2], c[3], a0, a1, b[2], b[3]);
      }
    }
  }

  // A of the accumulators of 16 columns. A lane has both rows of a pair but wants one of them, and of that one all
  // columns where it has four: two exchanges with the lane that has the other row and t0, four with the quad pair that
  // has the other t1.
  static __device__ __forceinline__ FragmentA fragment(const FragmentC& left, const FragmentC& right) {
    const bool t0 = threadIdx.x & 2;
    FragmentA a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const FragmentC& of = i ? right : left;
      const u32 upper = pack(of.x[0], of.x[1]), lower = pack(of.x[2], of.x[3]);
      const u32 own = t0 ? lower : upper;
      const u32 other = __shfl_xor_sync(0xffffffffu, t0 ? upper : lower, 2);
      a.x[4 * i] = t0 ? other : own;
      a.x[4 * i + 1] = t0 ? own : other;
      a.x[4 * i + 2] = __shfl_xor_sync(0xffffffffu, a.x[4 * i], 8);
      a.x[4 * i + 3] = __shfl_xor_sync(0xffffffffu, a.x[4 * i + 1], 8);
    }
    return a;
  }

  // Accumulators of 16 rows into a tile, and A from it by its rows.
  template <typename T, int n>
  static __device__ __forceinline__ void put(char* tile, int row, int column, const FragmentC (&c)[n], int lane) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 to = shared_address(tile) + T::offset(row + lane / 4 + 8 * half, column / 8 + i) + lane % 4 * 4;
        store_shared(to, pack(c[i].x[2 * half], c[i].x[2 * half + 1]));
      }
    }
  }
  template <typename T>
  struct KeyReader {
    LaneReader<T> reader;
    bool t1;
    __device__ __forceinline__ KeyReader(u32 tile, int row, int lane)
        : reader(reader_a<T>(tile, row, lane)), t1(lane & 2) {}
    __device__ __forceinline__ FragmentA operator()(int m, int kk) const {
      const FragmentA x = load_a(reader, 16 * m, kk);
      FragmentA a;
#pragma unroll
      for (int i = 0; i < 8; ++i) a.x[i] = t1 ? x.x[i ^ 2] : x.x[i];
      return a;
    }
  };

  // Writes accumulators of rows `row` and `row` + 8 of this lane to global memory, row r to `row_of(r)`: whole groups
  // of columns, every `step`-th from `first_group` on.
  template <int columns, int group, int step, int n, typename RowOf = SameRow>
  static __device__ __forceinline__ void store_fragments(const FragmentC (&c)[n], float scale0, float scale1,
                                                         Result* head, i64 row_stride, int row, int length,
                                                         int first_group, int lane, const RowOf& row_of = {}) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int column =
          (i / 4 * step + first_group) * group + lane / 2 % 2 * 16 + i % 2 * 8 + i / 2 % 2 * 4 + lane % 2 * 2;
      if (column >= columns) continue;
      const auto at = [&](int r) { return head + row_of(r) * row_stride + column; };
      if (row < length) store_pair(at(row), c[i].x[0] * scale0, c[i].x[1] * scale0);
      if (row + 8 < length) store_pair(at(row + 8), c[i].x[2] * scale1, c[i].x[3] * scale1);
    }
  }

  static __device__ __forceinline__ void store_pair(Result* to, float x, float y) {
    if constexpr (has_descale) {
      *reinterpret_cast<float2*>(to) = {x, y};
    } else {
      *reinterpret_cast<u32*>(to) = pack(x, y);
    }
  }
};

using Mma = Products<QuadPairs>;

}  // namespace jax_flash
