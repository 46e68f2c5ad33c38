#include "cuda/sm70/mma.cuh"

#include "cuda/device/backward.cuh"
