#include "cuda/sm70/mma.cuh"

#include "cuda/device/backward_bias.cuh"
