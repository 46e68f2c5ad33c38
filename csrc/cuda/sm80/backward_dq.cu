#include "cuda/sm80/mma.cuh"
//
#include "cuda/sm80/interleaved_dq.cuh"
//
#include "cuda/device/backward_dq.cuh"
