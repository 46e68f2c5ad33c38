#include "cuda/sm80/mma.cuh"

#include "cuda/shared/forward_few.cuh"
