// Warps that load tiles, and warpgroups that compute with them.
#pragma once

#include "cuda/device/tile_walk.cuh"

namespace jax_flash {

// Registers of a thread, for setmaxnreg. Warpgroups share the registers that the block has at its launch, as many for
// each thread, in portions of 8; a warpgroup that asks for more than there are waits for ever.
constexpr int launch_registers = 65536 / (32 * warps) / 8 * 8;
// Of the warp that loads: it wants more where it searches for tiles, if the others can do without.
__host__ __device__ constexpr int loading_registers(bool others_can) { return skips_tiles && others_can ? 40 : 24; }
__host__ __device__ constexpr int computing_registers(int loading) {
  return at_most(240, (launch_registers * warps / 4 - loading) / (warps / 4 - 1) / 8 * 8);
}

// The warp of this thread, the same in all lanes, so that the compiler knows it.
JAX_FLASH_DEVICE int uniform_warp() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0); }

// Arrivals of a warp at an mbarrier: lane 0's, behind a __syncwarp() where the others have read shared memory by
// themselves. racecheck does not follow that order; of the backward kernels with an arrival of every lane, 32, it
// reports nothing. These take up to 1% longer (H200, docs/ledger/hopper-backward.md).
constexpr int arrivals_of_a_warp = 1;
JAX_FLASH_DEVICE bool arrives(int lane) { return arrivals_of_a_warp == 32 || lane == 0; }

// Which buffer of a ring is next, and the parity of the phase to wait for.
template <int buffers>
struct Ring {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == buffers) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace jax_flash
