#include "cuda/sm75/mma.cuh"
//
#include "cuda/shared/forward_steps.cuh"

namespace jax_flash {
using Steps = Forward;
}

#include "cuda/shared/forward.cuh"
