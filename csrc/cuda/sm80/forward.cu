// FlashAttention-2 forward (Dao 2023, algorithm 1) for compute capability 8.0 and newer.
//
// A block owns block_q rows of one query head; each warp owns 16 * row_tiles_per_warp of them, with their accumulators
// in registers. K and V tiles come in by cp.async, one buffer each: V flies while Q K^T is computed, the next K while
// softmax and P V are. Keys are walked from the last to the first, so that the tiles to mask come first and the bare
// loop has no test in it.
#include "cuda/shared/mask.cuh"
#include "cuda/shared/schedule.cuh"
#include "cuda/shared/softmax.cuh"
#include "cuda/sm80/mma.cuh"

namespace jax_flash {

constexpr int threads = 32 * warps;
constexpr int row_tiles = block_q / (16 * warps);  // m16 tiles of a warp
using QTile = Tile<block_q, tile_head_dim>;
using KvTile = Tile<block_kv, tile_head_dim>;

struct SharedStorage {
  char q[QTile::bytes];  // and out, at the end
  char k[KvTile::bytes];
  char v[KvTile::bytes];
};

extern "C" __constant__ LaunchFacts jax_flash_forward_facts = {threads, block_q, sizeof(SharedStorage)};

struct Forward {
  const Problem& problem;
  SharedStorage& shared;
  const u16* k;
  const u16* v;
  int offset;
  int first_row;  // of the block
  int warp, lane;
  float scale_log2;
  LaneReader<QTile> q_reader;
  LaneReader<KvTile> k_reader, v_reader;
  FragmentC out[row_tiles][tile_head_dim / 8];
  RowStatistics statistics[row_tiles][2];

  __device__ __forceinline__ void load_k(int tile) const {
    load_tile<KvTile, threads>(shared_address(shared.k), k, problem.k.row_stride, tile * block_kv, problem.kv_length,
                               threadIdx.x);
  }
  __device__ __forceinline__ void load_v(int tile) const {
    load_tile<KvTile, threads>(shared_address(shared.v), v, problem.v.row_stride, tile * block_kv, problem.kv_length,
                               threadIdx.x);
  }

  template <bool masked>
  __device__ __forceinline__ void step(int tile) {
    FragmentC scores[row_tiles][block_kv / 8] = {};

    copies_wait<0>();
    __syncthreads();  // K has landed; everybody is done with the previous V
    load_v(tile);
    copies_commit();

#pragma unroll
    for (int kk = 0; kk < tile_head_dim / 16; ++kk) {
      FragmentA a[row_tiles];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) load_matrices(a[m].x, q_reader.address(16 * m, kk));
#pragma unroll
      for (int n = 0; n < block_kv / 16; ++n) {
        FragmentB2 b;
        load_matrices(b.x, k_reader.address(16 * n, kk));
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          multiply(scores[m][2 * n], a[m], b.x[0], b.x[1]);
          multiply(scores[m][2 * n + 1], a[m], b.x[2], b.x[3]);
        }
      }
    }

    copies_wait<0>();
    __syncthreads();  // V has landed; everybody is done with K
    if (tile > 0) load_k(tile - 1);
    copies_commit();

#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (masked) {
#pragma unroll
        for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int row = first_row + (warp * row_tiles + m) * 16 + lane / 4 + e / 2 * 8;
            const int column = tile * block_kv + n * 8 + lane % 4 * 2 + e % 2;
            if (!kept(offset, row, column, problem.kv_length)) scores[m][n].x[e] = -JAX_FLASH_INFINITY;
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = -JAX_FLASH_INFINITY;
#pragma unroll
        for (int n = 0; n < block_kv / 8; ++n) {
          maximum = fmaxf(maximum, fmaxf(scores[m][n].x[2 * half], scores[m][n].x[2 * half + 1]));
        }
        RowStatistics& row = statistics[m][half];
        const float shrink = row.update(quad_max(maximum), scale_log2);
        const float anchor = row.anchor(scale_log2);
#pragma unroll
        for (int n = 0; n < tile_head_dim / 8; ++n) {
          out[m][n].x[2 * half] *= shrink;
          out[m][n].x[2 * half + 1] *= shrink;
        }
#pragma unroll
        for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            scores[m][n].x[e] = exp2_approx(scores[m][n].x[e] * scale_log2 - anchor);
            row.total += scores[m][n].x[e];
          }
        }
      }
    }

#pragma unroll
    for (int kk = 0; kk < block_kv / 16; ++kk) {
      FragmentA p[row_tiles];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) p[m] = as_operand(scores[m][2 * kk], scores[m][2 * kk + 1]);
#pragma unroll
      for (int n = 0; n < tile_head_dim / 16; ++n) {
        FragmentB2 b;
        load_matrices_transposed(b.x, v_reader.address(16 * kk, n));
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          multiply(out[m][2 * n], p[m], b.x[0], b.x[1]);
          multiply(out[m][2 * n + 1], p[m], b.x[2], b.x[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(u16* out_head, float* lse) {
    const int warp_row = warp * row_tiles * 16;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowStatistics& row = statistics[m][half];
        row.total = quad_sum(row.total);
        inverse[half] = row.total == 0.f ? 0.f : 1.f / row.total;
        const int t = first_row + warp_row + m * 16 + lane / 4 + half * 8;
        if (lane % 4 == 0 && t < problem.q_length) lse[t] = row.lse(scale_log2);
      }
      // A warp's rows of Q are read by that warp alone, so they can take its rows of out.
      put_accumulators<QTile, 1>(shared.q, warp_row + m * 16, 0, out[m], inverse[0], inverse[1], lane);
    }
    __syncwarp();
    store_rows<QTile, 16 * row_tiles>(shared.q, warp_row, out_head, problem.out.row_stride, first_row + warp_row,
                                      problem.q_length, lane);
  }
};

extern "C" __global__ void __launch_bounds__(threads, min_blocks)
    jax_flash_forward(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);

  // Under causal the last rows have the most keys, and go first.
  const int row_blocks = ceil_div(problem.q_length, block_q);
  const Work work = work_of(row_blocks, problem.q_heads, problem.batch, problem.kv_length);
  const int row_block = option_causal ? row_blocks - 1 - work.block : work.block;
  const int head = work.head, batch = work.batch;
  const int kv_head = head / (problem.q_heads / problem.kv_heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  Forward forward{
      problem,
      shared,
      head_of(problem.k, batch, kv_head),
      head_of(problem.v, batch, kv_head),
      offset_of(problem, batch),
      row_block * block_q,
      warp,
      lane,
      static_cast<float>(problem.options.scale) * kLog2e,
      tall_reader<QTile>(shared_address(shared.q), warp * row_tiles * 16, lane),
      wide_reader<KvTile>(shared_address(shared.k), 0, lane),
      tall_reader<KvTile>(shared_address(shared.v), 0, lane),
  };
  const KeyTiles tiles =
      key_tiles<block_kv>(forward.offset, forward.first_row, block_q, problem.q_length, problem.kv_length);
  int tile = tiles.end - 1;
  if (tile >= 0) {
    load_tile<QTile, threads>(shared_address(shared.q), head_of(problem.q, batch, head), problem.q.row_stride,
                              forward.first_row, problem.q_length, threadIdx.x);
    forward.load_k(tile);
    copies_commit();
  }
  for (; tile >= tiles.bare; --tile) forward.step<true>(tile);
  for (; tile >= 0; --tile) forward.step<false>(tile);

  forward.finish(
      head_of(problem.out, batch, head),
      static_cast<float*>(problem.lse) + (static_cast<i64>(batch) * problem.q_heads + head) * problem.q_length);
}

}  // namespace jax_flash
