#include "cuda/sm80/mma.cuh"

#include "cuda/device/combine.cuh"
#include "cuda/device/float32_forward.cuh"
#include "cuda/device/forward_split_kv.cuh"
