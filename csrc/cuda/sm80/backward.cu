#include "cuda/sm80/mma.cuh"

#include "cuda/device/backward.cuh"
#include "cuda/device/convert_dq.cuh"
#include "cuda/device/float32_backward.cuh"
#include "cuda/device/float32_bias.cuh"
#include "cuda/device/sum_splits.cuh"
