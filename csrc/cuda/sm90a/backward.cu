#include "cuda/sm90a/mma.cuh"
//
#if JAX_FLASH_LARGEST_HEAD_DIM > 128
#include "cuda/sm90a/backward_wide.cuh"
#else
#include "cuda/sm90a/backward.cuh"
#endif
#include "cuda/device/float32_backward.cuh"
#include "cuda/device/float32_bias.cuh"
#include "cuda/device/sum_splits.cuh"
