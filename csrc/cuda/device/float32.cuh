// What the kernels share that compute heads in float32 arithmetic, without tensor cores: those whose rows differ too
// much in size to stand as float16 with one scale (scale.cuh). The other kernels pass over
// these heads, and these kernels over all others. There are few such heads, so the code is plain and the same for all
// families.
//
// A block owns a tile of rows, or of keys, and walks over tiles of the other side. A thread has 4 x 4 pairs of two
// tiles, own ty + 16 i and other tx + 16 j, and of a sum over the other side's rows own ty + 16 i and columns
// 4 tx + 64 c to 4 tx + 64 c + 3.
//
// Scores are in natural units, not of log2, and their products always summed in the same order: then the weight of the
// only key that a row looks at is exp(score - lse) = 1, exactly, however large the score. In units of log2 lse would be
// rounded on its way there and back.
#pragma once

#include "cuda/device/head_scores.cuh"
#include "cuda/device/programmatic_launch.cuh"
#include "cuda/device/tile_walk.cuh"

namespace jax_flash {

constexpr int float32_depth = 32;  // columns that are in shared memory at a time

struct Float32Storage {
  // Rows begin 4 banks apart, so that eight of them are read at once, in fours.
  float own[kFloat32Tile][float32_depth + 4];
  float other[kFloat32Tile][float32_depth + 4];
  float weights[kFloat32Tile][kFloat32Tile + 4];  // of pairs, own by other
  float sums[kFloat32Threads / 32];               // of the warps
};
static_assert(sizeof(Float32Storage) <= kFloat32SharedBytes);

// A thread's place in a tile of pairs.
JAX_FLASH_DEVICE int float32_ty() { return threadIdx.x / 16; }
JAX_FLASH_DEVICE int float32_tx() { return threadIdx.x % 16; }

// One head of an array as it was before it was scaled; rows from `length` on may hold anything, and count as zeros.
struct Float32Rows {
  const void* data;
  const int* list;  // of its rows; null: they are in their places
  i64 first;        // element
  i64 row_stride;
  int length;
  int columns;

  // `scaled` is the float16 array that stands for it, whose rows have as many limbs.
  __device__ __forceinline__ Float32Rows(const void* original, const Tensor& scaled, int columns, int batch, int head,
                                         const Rows& rows, const int* list = nullptr)
      : data(original),
        list(list),
        first((batch * scaled.batch_stride + rows.first * scaled.row_stride + head * scaled.head_stride) / limbs),
        row_stride(scaled.row_stride / limbs),
        length(rows.length),
        columns(columns) {}

  // One of two, member by member: a reference to one of two would put both on the stack.
  __device__ __forceinline__ Float32Rows(bool is_x, const Float32Rows& x, const Float32Rows& y)
      : data(is_x ? x.data : y.data),
        list(is_x ? x.list : y.list),
        first(is_x ? x.first : y.first),
        row_stride(is_x ? x.row_stride : y.row_stride),
        length(is_x ? x.length : y.length),
        columns(is_x ? x.columns : y.columns) {}

  __device__ __forceinline__ float4 four(int row, int column) const {
    if (row >= length || column >= columns) return {};
    if constexpr (has_kv_rows) row = list ? list[row] : row;
    const i64 at = first + row * row_stride + column;
    if constexpr (option_original_bfloat16) {
      const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const u16*>(data) + at);
      return {__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
              __uint_as_float(x.y & 0xffff0000u)};
    } else {
      return *reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
    }
  }
};

// c = X Y^T, of the own rows from `own` on and the other side's from `other` on.
JAX_FLASH_DEVICE void float32_products(float (&c)[4][4], Float32Storage& shared, const Float32Rows& x, int own,
                                       const Float32Rows& y, int other) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = 0.f;
  }
#pragma unroll 1
  for (int first = 0; first < x.columns; first += float32_depth) {
    constexpr int fours = float32_depth / 4;  // of a row
#pragma unroll
    for (int i = 0; i < kFloat32Tile * fours / kFloat32Threads; ++i) {
      const int four = i * kFloat32Threads + threadIdx.x, row = four / fours, column = four % fours * 4;
      *reinterpret_cast<float4*>(&shared.own[row][column]) = x.four(own + row, first + column);
      *reinterpret_cast<float4*>(&shared.other[row][column]) = y.four(other + row, first + column);
    }
    __syncthreads();  // both tiles are there
#pragma unroll 1
    for (int k = 0; k < float32_depth; k += 4) {
      float4 a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = *reinterpret_cast<const float4*>(&shared.own[float32_ty() + 16 * i][k]);
        b[i] = *reinterpret_cast<const float4*>(&shared.other[float32_tx() + 16 * i][k]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          c[i][j] = fmaf(a[i].x, b[j].x, c[i][j]);
          c[i][j] = fmaf(a[i].y, b[j].y, c[i][j]);
          c[i][j] = fmaf(a[i].z, b[j].z, c[i][j]);
          c[i][j] = fmaf(a[i].w, b[j].w, c[i][j]);
        }
      }
    }
    __syncthreads();  // everybody is done with them
  }
}

// Sums over the other side's rows, a thread's part of the own tile, which has at most so many columns.
template <int most_columns>
struct Float32Sums {
  static constexpr int groups = ceil_div(most_columns, 64);
  float4 x[4][groups];

  __device__ __forceinline__ Float32Sums() : x{} {}

  __device__ __forceinline__ void multiply(int i, float factor) {
#pragma unroll
    for (int c = 0; c < groups; ++c) {
      float4& four = x[i][c];
      four = {four.x * factor, four.y * factor, four.z * factor, four.w * factor};
    }
  }

  // Adds W Y, with the weights that all threads have put into shared memory, and Y's rows from `other` on.
  __device__ __forceinline__ void add(const Float32Storage& shared, const Float32Rows& y, int other) {
    const int rows = at_most(kFloat32Tile, y.length - other);
#pragma unroll 1
    for (int k = 0; k < rows; k += 4) {
      float weights[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(&shared.weights[float32_ty() + 16 * i][k]);
        weights[i][0] = four.x;
        weights[i][1] = four.y;
        weights[i][2] = four.z;
        weights[i][3] = four.w;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int c = 0; c < groups; ++c) {
          const float4 four = y.four(other + k + e, c * 64 + 4 * float32_tx());
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float weight = weights[i][e];
            x[i][c] = {fmaf(weight, four.x, x[i][c].x), fmaf(weight, four.y, x[i][c].y),
                       fmaf(weight, four.z, x[i][c].z), fmaf(weight, four.w, x[i][c].w)};
          }
        }
      }
    }
  }

  // The own row i, times `factor`.
  __device__ __forceinline__ void store(Result* row, int columns, int i, float factor) const {
#pragma unroll
    for (int c = 0; c < groups; ++c) {
      const int column = c * 64 + 4 * float32_tx();
      const float4& four = x[i][c];
      if (column >= columns) continue;
      *reinterpret_cast<float4*>(row + column) = {four.x * factor, four.y * factor, four.z * factor, four.w * factor};
    }
  }
};

// Over the 16 threads of an own row.
JAX_FLASH_DEVICE float float32_row_sum(float x) {
#pragma unroll
  for (int other = 1; other < 16; other *= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
  return x;
}
JAX_FLASH_DEVICE float float32_row_max(float x) {
#pragma unroll
  for (int other = 1; other < 16; other *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
  return x;
}
JAX_FLASH_DEVICE float natural_exp(float x) { return exp2_approx(x * kLog2e); }

// The scores of one query head.
struct Float32Scores : HeadScores {
  float scale;

  __device__ __forceinline__ Float32Scores(const Problem& problem, const Extent& extent, int head)
      : HeadScores(problem, extent, band_of(problem, extent), head, 1.f), scale(scale_of(problem, extent.batch)) {}

  // The score of a product, -inf where the pair is not kept, whatever the product is; and d score / d (scale *
  // product), or with `of_bias` d score / d bias. A bias of -inf masks: what it hides may be so large that the product
  // is infinite.
  template <bool of_bias = false>
  __device__ __forceinline__ float of(float product, int row, int column, float& derivative) const {
    derivative = 1.f;
    // Rounded here: fused with what follows it could differ from pass to pass.
    float score = __fmul_rn(product, scale), bias = 0.f;
    bool kept = row < extent.q.length && keep(row, column);
    if constexpr (has_bias) {
      bias = as_float(biases.at(biases.row(row, extent), column, extent));
      kept = kept && bias != -JAX_FLASH_INFINITY;
    }
    if constexpr (has_mask) kept = kept && masks.at(masks.row(row, extent), column, extent);
    if constexpr (modifies_scores) {
      score = modified.modify<of_bias>(keep.functions(), score, bias, {row, column}, derivative);
    }
    return kept ? score : -JAX_FLASH_INFINITY;
  }
  __device__ __forceinline__ float operator()(float product, int row, int column, float& derivative) const {
    return of(product, row, column, derivative);
  }
  // The score before the score function.
  __device__ __forceinline__ float before_function(float product, int row, int column) const {
    float bias = 0.f, derivative;
    if constexpr (has_bias) bias = as_float(biases.at(biases.row(row, extent), column, extent));
    return modified.before_function(__fmul_rn(product, scale), bias, row, column, derivative);
  }

  // What dropout multiplies a weight with.
  __device__ __forceinline__ float dropout_factor(int row, int column) const {
    if constexpr (!with_dropout_rate) return 1.f;
    const uint4 bits = dropout.bits(row, column);
    const int eight = column / 8 % 4;
    const u32 word = eight < 2 ? (eight == 0 ? bits.x : bits.y) : (eight == 2 ? bits.z : bits.w);
    return dropout.keeps(word, row / 8 % 2) ? dropout.factor : 0.f;
  }
};

// Calls `run` with batch, key head and number for each of the block's items of work, of which every head that is
// computed in float32 has `items`. All warps of a block find the same.
template <typename Run>
JAX_FLASH_DEVICE void for_float32_items(const Problem& problem, int items, const Run& run) {
  const int heads = problem.batch * problem.kv_heads;
  i64 next = blockIdx.x;
  for (int first = 0; first < heads; first += 32) {
    const int own = first + static_cast<int>(threadIdx.x % 32);
    u32 flagged = __ballot_sync(0xffffffffu, own < heads && computed_in_float32(problem, 0, own));
    for (; flagged != 0; flagged &= flagged - 1) {
      const int head = first + __ffs(flagged) - 1;
      for (; next < items; next += gridDim.x) {
        run(head / problem.kv_heads, head % problem.kv_heads, static_cast<int>(next));
      }
      next -= items;
    }
  }
}

// Tiles of rows or keys of which a batch entry has `length`, packed sequences each beginning with one of their own.
JAX_FLASH_DEVICE int float32_tiles(const Problem& problem, int length) {
  return blocks_of(problem, length, kFloat32Tile);
}

// A tile of rows, or with `of_keys` of keys.
struct Float32Place {
  bool of_keys;
  int sequence, first;
  Extent extent;

  __device__ __forceinline__ Float32Place(const Problem& problem, bool of_keys, int batch, int tile)
      : of_keys(of_keys) {
    const int* cu_lengths = of_keys ? problem.cu_kv_lengths : problem.cu_q_lengths;
    sequence = sequence_of(problem, cu_lengths, batch, kFloat32Tile, tile);
    first = tile * kFloat32Tile;
    extent = extent_of(problem, batch, sequence);
  }
  __device__ __forceinline__ const Rows& rows() const { return of_keys ? extent.kv : extent.q; }
  __device__ __forceinline__ bool is_empty() const { return packed && first >= rows().stored; }

  // The tiles of the other side that may have pairs with this one.
  __device__ __forceinline__ TileWalk<kFloat32Tile> others(const Problem& problem, const Heads& heads) const {
    const Band band = band_of(problem, extent);
    return of_keys ? walk_of_rows<kFloat32Tile, kFloat32Tile>(problem, extent, band, heads, first)
                   : walk_of_keys<kFloat32Tile, kFloat32Tile>(problem, extent, band, heads, first);
  }
  // Calls `visit` with the first row of each, for a query head.
  template <typename Visit>
  __device__ __forceinline__ void walk(const Problem& problem, int head, const Visit& visit) const {
    const TileWalk<kFloat32Tile> tiles = others(problem, {head, 1});
    for (int tile = tiles.after(tiles.range.begin - 1); tile < tiles.range.end; tile = tiles.after(tile)) {
      visit(tile * kFloat32Tile);
    }
  }
};

}  // namespace jax_flash
