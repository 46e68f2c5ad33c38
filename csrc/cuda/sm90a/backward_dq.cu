#include "cuda/sm90a/mma.cuh"
//
#include "cuda/sm90a/backward_dq.cuh"
