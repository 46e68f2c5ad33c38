#include "cuda/sm70/mma.cuh"

#include "cuda/device/backward_bias.cuh"
#include "cuda/device/float32_bias.cuh"
