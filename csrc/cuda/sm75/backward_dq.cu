#include "cuda/sm75/mma.cuh"
//
#include "cuda/shared/backward_dq_steps.cuh"

namespace jax_flash {
using Steps = BackwardDq;
}

#include "cuda/shared/backward_dq.cuh"
