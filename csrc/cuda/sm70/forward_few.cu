#include "cuda/sm70/mma.cuh"

#include "cuda/shared/forward_few.cuh"
