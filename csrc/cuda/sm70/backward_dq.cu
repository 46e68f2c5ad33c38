#include "cuda/sm70/mma.cuh"
//
#include "cuda/device/backward_dq_steps.cuh"

namespace jax_flash {
using Steps = BackwardDq;
}

#include "cuda/device/backward_dq.cuh"
