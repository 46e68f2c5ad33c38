namespace jax_flash {
constexpr int column_step = 8;  // these kernels have no tiles
}

#include "cuda/device/pack.cuh"

#include "cuda/device/scale.cuh"
