#include "cuda/sm80/mma.cuh"
//
#include "cuda/sm80/interleaved_steps.cuh"
//
#include "cuda/device/float32_forward.cuh"
#include "cuda/device/forward.cuh"
