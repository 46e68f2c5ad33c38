#include "cuda/sm80/mma.cuh"

#include "cuda/shared/backward_bias.cuh"
