// What heads that are computed in float32 arithmetic (float32.cuh) add to the gradient of a bias, unless all rows share
// it: a block owns a tile of a plane of dbias and adds, in one order, what the heads and batch entries have that share
// the plane, to what the other kernels have left there.
#pragma once

#include "cuda/device/float32_pairs.cuh"

namespace jax_flash {

JAX_FLASH_DEVICE void float32_bias_item(const Problem& problem, Float32Storage& shared, int plane, int row_tile,
                                        int key_tile) {
  const Strides& s = problem.dbias_strides;
  const int planes = s.head ? problem.q_heads : 1;  // of a batch entry
  const int plane_head = plane % planes, plane_batch = plane / planes;
  const int group = problem.q_heads / problem.kv_heads;
  const int first_key = key_tile * kFloat32Tile;
  float sum[4][4] = {};
  bool changed = false;
  // Every head and batch entry that shares the plane.
  const int heads = s.head ? 1 : problem.q_heads, entries = s.batch ? 1 : problem.batch;
  for (int i = 0; i < heads * entries; ++i) {
    const int batch = plane_batch + i / heads, head = plane_head + i % heads;
    if (!computed_in_float32(problem, batch, head / group)) continue;
    const Float32Place place(problem, false, batch, row_tile);
    if (!place.others(problem, {head, 1}).visits(key_tile)) continue;
    changed = true;
    const Float32Pairs pairs(problem, shared, place, head);
    pairs.weigh(first_key, true, [&](int i, int j, float, float ds, float) { sum[i][j] += ds; });
  }
  if (!changed) return;
  float* to = static_cast<float*>(problem.dbias) + plane_batch * s.batch + plane_head * s.head;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row_tile * kFloat32Tile + float32_ty() + 16 * i, key = first_key + float32_tx() + 16 * j;
      if (row < problem.q_length && key < problem.kv_length) to[row * s.row + key * s.column] += sum[i][j];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kFloat32Threads)
    jax_flash_float32_bias(const __grid_constant__ Problem problem) {
  if constexpr (has_descale && has_dbias) {
    extern __shared__ __align__(128) char memory[];
    wait_for_the_kernel_before();
    const Strides& s = problem.dbias_strides;
    if (s.row == 0) return;  // float32_backward.cuh has it
    bool any = false;
    for (int head = threadIdx.x % 32; head < problem.batch * problem.kv_heads; head += 32) {
      any = any || computed_in_float32(problem, 0, head);
    }
    if (!__any_sync(0xffffffffu, any)) return;
    const int q_tiles = ceil_div(problem.q_length, kFloat32Tile), kv_tiles = ceil_div(problem.kv_length, kFloat32Tile);
    const i64 planes = static_cast<i64>(s.batch ? problem.batch : 1) * (s.head ? problem.q_heads : 1);
    // No dbias has 2^32 tiles, and 64 bits would spill.
    for (u32 item = blockIdx.x; item < planes * q_tiles * kv_tiles; item += gridDim.x) {
      const u32 row = item / kv_tiles;
      float32_bias_item(problem, *reinterpret_cast<Float32Storage*>(memory), static_cast<int>(row / q_tiles),
                        static_cast<int>(row % q_tiles), static_cast<int>(item % kv_tiles));
    }
  }
}

}  // namespace jax_flash
