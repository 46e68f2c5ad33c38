#include "cuda/sm70/mma.cuh"

#include "cuda/shared/backward_bias.cuh"
