// Hopper's instructions: the copy engine, barriers in shared memory and wgmma.
#pragma once

namespace jax_flash {
constexpr int column_step = 16;
}

#include "cuda/device/pack.cuh"
#include "cuda/sm90a/hopper.cuh"

namespace jax_flash {

static_assert(parts == 1, "arrays in two parts are served by the kernels of sm80");
constexpr bool loads_take_registers = false;

}  // namespace jax_flash
