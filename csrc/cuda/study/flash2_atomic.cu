// FlashAttention-2 with a backward in one pass (Algorithm 2): a block has a tile of keys, sums their dk and dv, and
// adds its part of dq to what the other blocks add, atomically and therefore in any order.
#include "cuda/study/flash2_backward.cuh"

namespace jax_flash {

// query, key, value, dout, lse, d, zeros -> dq, which is in the place of the zeros, dk, dv
extern "C" __global__ void backward(const __grid_constant__ Study p) { backward_of_keys<true>(p, 8); }

}  // namespace jax_flash
