#include "cuda/sm80/mma.cuh"

#include "cuda/device/backward_bias.cuh"
