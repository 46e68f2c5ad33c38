#include "cuda/sm80/mma.cuh"
//
#include "cuda/sm80/woven_steps.cuh"
//
#include "cuda/device/forward.cuh"
