#include "cuda/sm75/mma.cuh"

#include "cuda/shared/backward_bias.cuh"
