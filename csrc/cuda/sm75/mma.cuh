// Turing's instructions: ldmatrix and mma.m16n8k8, for float16 alone. Two of them are one m16n8k16, fragments and all.
#pragma once

namespace jax_flash {
constexpr int column_step = 16;
}

#include "cuda/device/matrices.cuh"
#include "cuda/device/register_loads.cuh"

namespace jax_flash {

static_assert(dtype == DType::f16, "other dtypes come as float16 with descale");

JAX_FLASH_DEVICE void multiply_16bit(FragmentC& c, const Matrix4& a, u32 b0, u32 b1) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
                 : "r"(a.x[2 * half]), "r"(a.x[2 * half + 1]), "r"(half ? b1 : b0));
  }
}

// Eight steps of 16 k, or the error of lse would be above that of plain float16 attention (head_dim 256).
using Mma = Products<Matrices<8>>;

}  // namespace jax_flash
