#include "cuda/sm80/mma.cuh"

#include "cuda/shared/backward.cuh"
#include "cuda/shared/sum_splits.cuh"
