#include "cuda/sm80/mma.cuh"

#include "cuda/device/forward_few.cuh"
