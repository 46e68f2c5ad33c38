// Hopper's instructions: TMA, mbarriers and wgmma.
#pragma once

namespace jax_flash {
constexpr int column_step = 16;
}

#include "cuda/device/pack.cuh"
#include "cuda/sm90a/hopper.cuh"

namespace jax_flash {

static_assert(limbs == 1, "arrays of two limbs are served by the kernels of sm80");
constexpr bool loads_take_registers = false;
constexpr bool one_warp_loads = true;

}  // namespace jax_flash
