#include "cuda/sm70/mma.cuh"

#include "cuda/device/backward.cuh"
#include "cuda/device/convert_dq.cuh"
#include "cuda/device/float32_backward.cuh"
#include "cuda/device/float32_bias.cuh"
