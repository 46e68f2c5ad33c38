#include "cuda/sm70/mma.cuh"

#include "cuda/device/forward_few.cuh"
