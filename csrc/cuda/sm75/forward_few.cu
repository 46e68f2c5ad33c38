#include "cuda/sm75/mma.cuh"

#include "cuda/shared/forward_few.cuh"
