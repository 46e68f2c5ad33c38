// float32 arrays as float16 ones, for products at TF32's accuracy at twice its rate, and bfloat16 ones where the matrix
// instructions take float16 only.
//
// float16 keeps as many digits as TF32, 11, and more than bfloat16, but of a smaller range. So every array is
// multiplied by a power of two, one for each key head and the query heads that attend to it, by which the largest of
// its values comes near float16's own. Values down to 2^-29 of the largest then have all their digits, and values below
// 2^-40 of it, which no sum with it would notice in float32, become 0. For all of float32's accuracy an array comes as
// two limbs, its float16 rounding and what that leaves: 22 digits.
//
// A row that is much larger than the others of its head would leave these few digits or none: such a head is computed
// in float32, from the arrays as they were (float32.cuh).
//
// Two kernels: jax_flash_row_sizes finds the sizes of rows, and jax_flash_scale makes float16 and a ScaleRecord of
// them. A block of either has a chunk of the rows of one array and one key head. Where a key head has few rows these
// are a single chunk, and there is jax_flash_scale alone, which finds the sizes itself.
#pragma once

#include "cuda/device/programmatic_launch.cuh"

namespace jax_flash {

extern "C" __constant__ KernelTraits jax_flash_scale_traits = {
    .threads = 32 * kScaleWarps,  // at most
    .shared_bytes = sizeof(RowSizes) * (kScaleWarps + 1),
};

// By so much may the largest values of a head's rows differ. A row that is smaller by as much than the largest one
// keeps what is not below 2^-20 of its own largest value, and all digits of what is not below 2^-9.
constexpr float spread = 0x1p20f;
// The same for the rows of gradients: rows with small gradients are usual in training. With one limb a row that is
// smaller by as much keeps 10 digits of its largest value, and what these lose concerns its own dQ.
constexpr float gradient_spread = limbs == 1 ? 0x1p30f : spread;

constexpr int scaled_exponent = 15;  // the largest scaled value is in [2^14, 2^15)
constexpr float largest_float = 0x1.fffffep127f;

JAX_FLASH_DEVICE float finite_magnitude(float x) {
  const float magnitude = fabsf(x);
  return magnitude <= largest_float ? magnitude : 0.f;
}

// The power of two that brings `largest` below 2^scaled_exponent.
JAX_FLASH_DEVICE float scale_for(float largest) {
  if (largest == 0.f) return 0x1p15f;
  const int exponent = static_cast<int>(__float_as_uint(fminf(largest, largest_float)) >> 23) - 126;
  return __uint_as_float(static_cast<u32>(127 + at_most(125, scaled_exponent - exponent)) << 23);
}

JAX_FLASH_DEVICE RowSizes no_rows() { return {0.f, JAX_FLASH_INFINITY, 0.f, 0.f, 0.f, JAX_FLASH_INFINITY}; }
JAX_FLASH_DEVICE RowSizes of_both(const RowSizes& a, const RowSizes& b) {
  return {fmaxf(a.largest, b.largest), fminf(a.smallest, b.smallest),     fmaxf(a.norm, b.norm),
          fmaxf(a.delta, b.delta),     fmaxf(a.largest_ds, b.largest_ds), fminf(a.smallest_ds, b.smallest_ds)};
}

// Of numbers that are not negative, over the lanes of a warp.
JAX_FLASH_DEVICE float warp_max(float x) {
#if __CUDA_ARCH__ >= 800
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
#else
  for (int other = 16; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
  return x;
#endif
}
JAX_FLASH_DEVICE float warp_min(float x) {
#if __CUDA_ARCH__ >= 800
  return __uint_as_float(__reduce_min_sync(0xffffffffu, __float_as_uint(x)));
#else
  for (int other = 16; other > 0; other /= 2) x = fminf(x, __shfl_xor_sync(0xffffffffu, x, other));
  return x;
#endif
}
JAX_FLASH_DEVICE RowSizes of_warp(const RowSizes& sizes, bool gradients) {
  RowSizes all = no_rows();
  all.largest = warp_max(sizes.largest);
  all.smallest = warp_min(sizes.smallest);
  if constexpr (limbs == 2) all.norm = warp_max(sizes.norm);
  if (gradients) {
    all.delta = warp_max(sizes.delta);
    all.largest_ds = warp_max(sizes.largest_ds);
    all.smallest_ds = warp_min(sizes.smallest_ds);
  }
  return all;
}

constexpr int row_lanes = 8;  // that share a row, each with eight columns of every 64
constexpr int lane_columns = 8, column_groups = ceil_div(head_dim, row_lanes* lane_columns);
constexpr int rows_at_a_time = column_groups > 2 ? 1 : 2;  // of a lane, whose loads wait together

struct LaneRow {
  i64 index;  // in the scaled array; -1: there is no row
  int head, position;
  bool kept;
  float x[column_groups][lane_columns];  // zeros where there is no column, and if the row is not kept
};
JAX_FLASH_DEVICE int lane_column(int group) {
  return threadIdx.x % row_lanes * lane_columns + group * row_lanes * lane_columns;
}

// A block's part of the work.
struct ScaleChunk {
  const Scaling& scaling;
  int chunk, array, kv_head, batch;

  __device__ __forceinline__ explicit ScaleChunk(const Scaling& scaling) : scaling(scaling) {
    int index = blockIdx.x;
    chunk = index % scaling.chunks;
    index /= scaling.chunks;
    array = index % scaling.count;
    index /= scaling.count;
    kv_head = index % scaling.kv_heads;
    batch = index / scaling.kv_heads;
  }

  __device__ __forceinline__ i64 head() const { return static_cast<i64>(batch) * scaling.kv_heads + kv_head; }
  // Of the chunks of its array and key head.
  __device__ __forceinline__ RowSizes* sizes() const {
    return scaling.sizes + (head() * scaling.count + array) * scaling.chunks;
  }
  __device__ __forceinline__ bool has_gradients() const { return scaling.of_inputs != nullptr; }

  // Calls `use` with every row of the chunk, and with rows that are not there: all lanes of a warp call at the same
  // time.
  template <typename Use>
  __device__ __forceinline__ void for_rows(const Use& use) const {
    constexpr int warp_rows = 32 / row_lanes;
    const int step = static_cast<int>(blockDim.x) / row_lanes;
    const ScaledArray& of = scaling.arrays[array];
    const int group = of.heads / scaling.kv_heads;
    const int rows = of.length * group, in_chunk = ceil_div(rows, scaling.chunks);
    const int end = at_most(rows, (chunk + 1) * in_chunk), own = static_cast<int>(threadIdx.x) / row_lanes;
    const int warp_own = static_cast<int>(threadIdx.x) / 32 * warp_rows;
#pragma unroll 1
    for (int first = chunk * in_chunk; first + warp_own < end; first += rows_at_a_time * step) {
      LaneRow lane_rows[rows_at_a_time];
#pragma unroll
      for (int i = 0; i < rows_at_a_time; ++i) {
        LaneRow& lane_row = lane_rows[i];
        const int row = first + i * step + own;
        lane_row.position = group == 1 ? row : row / group;
        lane_row.head = kv_head * group + row - lane_row.position * group;
        const i64 first_row = static_cast<i64>(batch) * of.length;
        lane_row.index = (first_row + lane_row.position) * of.heads + lane_row.head;
        lane_row.kept = row < end && (!of.kept || of.kept[lane_row.index]);
        i64 from = lane_row.index;
        if (of.list && lane_row.kept) {
          from = (first_row + of.list[first_row + lane_row.position]) * of.heads + lane_row.head;
        }
#pragma unroll
        for (int j = 0; j < column_groups; ++j) load(lane_row.x[j], of, from, lane_row.kept, lane_column(j));
        if (row >= end) lane_row.index = -1;
      }
#pragma unroll
      for (const LaneRow& lane_row : lane_rows) use(lane_row);
    }
  }

 private:
  static __device__ __forceinline__ void load(float (&x)[lane_columns], const ScaledArray& of, i64 row, bool kept,
                                              int column) {
#pragma unroll
    for (float& value : x) value = 0.f;
    if (!kept || column >= of.columns) return;
    const i64 at = row * of.columns + column;
    if constexpr (option_original_bfloat16) {
      const uint4 pairs = *reinterpret_cast<const uint4*>(static_cast<const u16*>(of.original) + at);
      const u32 words[] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
      for (int i = 0; i < lane_columns; ++i) {
        x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
      }
    } else {
      const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(of.original) + at);
      const float4 low = from[0], high = from[1];
      const float all[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < lane_columns; ++i) x[i] = all[i];
    }
  }
};

// Over the lanes of a row.
template <typename Of>
JAX_FLASH_DEVICE float over_row(float x, const Of& of) {
#pragma unroll
  for (int other = 1; other < row_lanes; other *= 2) x = of(x, __shfl_xor_sync(0xffffffffu, x, other));
  return x;
}

template <typename Of>
JAX_FLASH_DEVICE float largest_of(const LaneRow& row, const Of& magnitude) {
  float found = 0.f;
#pragma unroll
  for (const auto& columns : row.x) {
#pragma unroll
    for (float x : columns) found = fmaxf(found, magnitude(x));
  }
  return over_row(found, [](float a, float b) { return fmaxf(a, b); });
}

// The largest finite magnitude.
JAX_FLASH_DEVICE float size_of(const LaneRow& row) {
  const float size = largest_of(row, [](float x) { return fabsf(x); });  // NaN is never the larger one to fmaxf
  return __any_sync(0xffffffffu, size > largest_float) ? largest_of(row, finite_magnitude) : size;
}

// The Euclidean norm of the finite values, which are scaled so that no square is infinite.
JAX_FLASH_DEVICE float norm_of(const LaneRow& row, float size) {
  const float scale = scale_for(size);
  float sum = 0.f;
#pragma unroll
  for (const auto& columns : row.x) {
#pragma unroll
    for (float x : columns) {
      const float scaled = finite_magnitude(x) * scale;
      sum = fmaf(scaled, scaled, sum);
    }
  }
  return fminf(sqrtf(over_row(sum, [](float a, float b) { return a + b; })) / scale, largest_float);
}

// Of a block's chunk, for its first warp.
JAX_FLASH_DEVICE RowSizes sizes_of_rows(const ScaleChunk& chunk, RowSizes* of_warps) {
  const Scaling& scaling = chunk.scaling;
  const bool gradients = chunk.has_gradients(), wants_norm = limbs == 2 && (gradients || chunk.array == 2);
  // |dS| = P |dP - delta|, and |dP| of a row is at most its size times this.
  const float of_values = gradients ? scaling.value_head_dim * scaling.of_inputs[chunk.head()].largest_value : 0.f;
  RowSizes sizes = no_rows();
  chunk.for_rows([&](const LaneRow& lane_row) {
    const float size = size_of(lane_row);
    RowSizes row = no_rows();
    row.largest = size;
    if (size > 0.f) row.smallest = size;
    if (wants_norm) row.norm = norm_of(lane_row, size);
    if (gradients && lane_row.kept) {
      const ScaledArray& dout = scaling.arrays[0];
      const i64 of_head = static_cast<i64>(chunk.batch) * dout.heads + lane_row.head;
      row.delta = finite_magnitude(scaling.delta[of_head * dout.length + lane_row.position]);
      const float ds = fminf(size == 0.f ? 0.f : size * of_values, largest_float) + row.delta;
      row.largest_ds = ds;
      if (ds > 0.f) row.smallest_ds = ds;
    }
    sizes = of_both(sizes, row);
  });
  sizes = of_warp(sizes, gradients);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) of_warps[warp] = sizes;
  __syncthreads();  // the sizes of all warps are there
  return warp == 0 ? of_warp(lane < warps ? of_warps[lane] : no_rows(), gradients) : sizes;
}

extern "C" __global__ void __launch_bounds__(32 * kChunkWarps)
    jax_flash_row_sizes(const __grid_constant__ Scaling scaling) {
  extern __shared__ __align__(128) char memory[];
  let_the_next_kernel_begin();
  wait_for_the_kernel_before();
  const ScaleChunk chunk(scaling);
  const RowSizes sizes = sizes_of_rows(chunk, reinterpret_cast<RowSizes*>(memory));
  if (threadIdx.x == 0) chunk.sizes()[chunk.chunk] = sizes;
}

JAX_FLASH_DEVICE bool differ_too_much(const RowSizes& rows, float most) { return rows.smallest < rows.largest / most; }

// What the record has of a block's array.
JAX_FLASH_DEVICE void write_record(const ScaleChunk& chunk, const RowSizes& rows) {
  const Scaling& scaling = chunk.scaling;
  ScaleRecord& record = scaling.records[chunk.head()];
  const float descale = 1.f / scale_for(rows.largest);
  if (chunk.has_gradients()) {
    const ScaleRecord& inputs = scaling.of_inputs[chunk.head()];
    // Norms are nearer: low limbs of dS have fewer digits the smaller dS is against its bound.
    const float dp = limbs == 2 ? rows.norm * inputs.value_norm
                                : rows.largest * inputs.largest_value * static_cast<float>(scaling.value_head_dim);
    record = inputs;
    record.ds = scale_for(dp * scaling.dropout_factor + rows.delta);
    const bool in_float32 =
        differ_too_much(rows, gradient_spread) || rows.smallest_ds < rows.largest_ds / gradient_spread;
    record.dout = in_float32 ? 0.f : descale;
    return;
  }
  const float input = differ_too_much(rows, spread) ? 0.f : descale;
  if (chunk.array == 0) {
    record.query = input;
    record.dout = record.ds = 1.f;
    record.unused = 0.f;
  } else if (chunk.array == 1) {
    record.key = input;
  } else {
    record.value = input;
    record.largest_value = rows.largest;
    record.value_norm = rows.norm;
  }
}

// Eight columns in float16, and with two limbs the same of what that leaves. What is not finite leaves nothing.
JAX_FLASH_DEVICE void store_limbs(u16* to, const float (&x)[lane_columns], int columns) {
  auto store = [](u16* to, const float (&y)[lane_columns]) {
    *reinterpret_cast<uint4*>(to) = {pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7])};
  };
  store(to, x);
  if constexpr (limbs == 2) {
    float low[lane_columns];
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
      low[i] = fabsf(x[i]) <= largest_float ? x[i] - half_to_float(static_cast<u16>(pack(x[i], 0.f))) : 0.f;
    }
    store(to + columns, low);
  }
}

JAX_FLASH_DEVICE void scale_rows(const ScaleChunk& chunk, float scale) {
  const ScaledArray& of = chunk.scaling.arrays[chunk.array];
  chunk.for_rows([&](const LaneRow& row) {
    if (row.index < 0) return;
#pragma unroll
    for (int j = 0; j < column_groups; ++j) {
      if (lane_column(j) >= of.columns) continue;
      float scaled[lane_columns];
#pragma unroll
      for (int i = 0; i < lane_columns; ++i) scaled[i] = row.x[j][i] * scale;
      store_limbs(of.scaled + row.index * limbs * of.columns + lane_column(j), scaled, of.columns);
    }
  });
}

extern "C" __global__ void __launch_bounds__(32 * kScaleWarps, 2)
    jax_flash_scale(const __grid_constant__ Scaling scaling) {
  extern __shared__ __align__(128) char memory[];
  RowSizes* const shared = reinterpret_cast<RowSizes*>(memory);
  let_the_next_kernel_begin();
  wait_for_the_kernel_before();
  const ScaleChunk chunk(scaling);
  if (scaling.chunks == 1) {
    const RowSizes sizes = sizes_of_rows(chunk, shared);
    if (threadIdx.x == 0) shared[kScaleWarps] = sizes;
  } else if (threadIdx.x < 32) {
    RowSizes whole = no_rows();
#pragma unroll 1
    for (int i = threadIdx.x; i < scaling.chunks; i += 32) whole = of_both(whole, chunk.sizes()[i]);
    whole = of_warp(whole, chunk.has_gradients());
    if (threadIdx.x == 0) shared[kScaleWarps] = whole;
  }
  __syncthreads();  // the sizes of all rows are there
  const RowSizes& rows = shared[kScaleWarps];
  if (chunk.chunk == 0 && threadIdx.x == 0) write_record(chunk, rows);
  scale_rows(chunk, scale_for(rows.largest));
}

}  // namespace jax_flash
