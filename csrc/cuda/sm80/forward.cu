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
using KTile = Tile<block_kv, tile_head_dim>;
using VTile = Tile<block_kv, tile_value_head_dim>;
using OutTile = Tile<block_q, tile_value_head_dim>;
constexpr int group = Mma::group(tile_value_head_dim, 1);  // of columns of out
using VReader = Mma::ColumnReader<VTile, group>;

struct SharedStorage {
  char q[QTile::bytes];  // and out, at the end, unless it is stored from registers
  char k[KTile::bytes];
  char v[VTile::bytes];
};

extern "C" __constant__ LaunchFacts jax_flash_forward_facts = {threads, block_q, sizeof(SharedStorage)};

struct Forward {
  const Problem& problem;
  SharedStorage& shared;
  const Element* k;
  const Element* v;
  int offset;
  int first_row;  // of the block
  int warp, lane;
  float scale_log2;
  LaneReader<QTile> q_reader;
  LaneReader<KTile> k_reader;
  VReader v_reader;
  FragmentC out[row_tiles][tile_value_head_dim / 8];
  RowStatistics statistics[row_tiles][2];

  __device__ __forceinline__ void load_k(int tile) const {
    load_tile<KTile, head_dim, threads>(shared_address(shared.k), k, problem.k.row_stride, tile * block_kv,
                                        problem.kv_length, threadIdx.x);
  }
  __device__ __forceinline__ void load_v(int tile) const {
    load_tile<VTile, value_head_dim, threads>(shared_address(shared.v), v, problem.v.row_stride, tile * block_kv,
                                              problem.kv_length, threadIdx.x);
  }

  template <bool masked>
  __device__ __forceinline__ void step(int tile) {
    FragmentC scores[row_tiles][block_kv / 8] = {};

    copies_wait<0>();
    __syncthreads();  // K has landed; everybody is done with the previous V
    load_v(tile);
    copies_commit();

    Mma::multiply_rows<head_dim>(scores, q_reader, k_reader);

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
        for (int n = 0; n < tile_value_head_dim / 8; ++n) {
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

    Mma::multiply_columns<block_kv>(out, [&](int m, int kk) { return Mma::operand(scores[m], kk); }, v_reader);
  }

  __device__ __forceinline__ void finish(Element* out_head, float* lse) {
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
      if constexpr (Mma::direct_stores) {
        Mma::store_fragments<value_head_dim, group, 1>(out[m], inverse[0], inverse[1], out_head, problem.out.row_stride,
                                                       first_row + warp_row + m * 16 + lane / 4, problem.q_length, 0,
                                                       lane);
      } else {
        // A warp's rows of Q are read by that warp alone, so they can take its rows of out.
        put_accumulators<OutTile, 1>(shared.q, warp_row + m * 16, 0, out[m], inverse[0], inverse[1], lane);
      }
    }
    if constexpr (!Mma::direct_stores) {
      __syncwarp();
      store_rows<OutTile, value_head_dim, 16 * row_tiles>(
          shared.q, warp_row, out_head, problem.out.row_stride, first_row + warp_row, problem.q_length, lane);
    }
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
      wide_reader<KTile>(shared_address(shared.k), 0, lane),
      VReader(shared_address(shared.v), lane),
  };
  const KeyTiles tiles =
      key_tiles<block_kv>(forward.offset, forward.first_row, block_q, problem.q_length, problem.kv_length);
  int tile = tiles.end - 1;
  if (tile >= 0) {
    load_tile<QTile, head_dim, threads>(shared_address(shared.q), head_of(problem.q, batch, head), problem.q.row_stride,
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
