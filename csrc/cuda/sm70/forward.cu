#include "cuda/sm70/mma.cuh"

#include "cuda/shared/forward.cuh"
