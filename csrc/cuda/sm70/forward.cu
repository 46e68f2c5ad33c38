#include "cuda/sm70/mma.cuh"
//
#include "cuda/device/forward_steps.cuh"

namespace jax_flash {
using Steps = Forward;
}

#include "cuda/device/float32_forward.cuh"
#include "cuda/device/forward.cuh"
