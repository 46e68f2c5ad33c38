// cp.async's groups, mma.m16n8k16, and loads that may be left off; on the host tests/emulator has what takes their
// place.
#pragma once

#include "cuda/device/matrices.cuh"

namespace jax_flash {

JAX_FLASH_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` committed groups of this thread are under way.
template <int pending>
JAX_FLASH_DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// mma.m16n8k16: of A 16 x 16 and B 16 x 8.
JAX_FLASH_DEVICE void multiply_16bit(FragmentC& c, const Matrix4& a, u32 b0, u32 b1) {
  if constexpr (dtype == DType::bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
  }
}

// Loads from global memory. What is not `valid` stays as it is.
JAX_FLASH_DEVICE void load_global(u32& x, const Element* from, bool valid) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.u32 %0, [%1];}"
               : "+r"(x)
               : "l"(from), "r"(static_cast<int>(valid))
               : "memory");
}
JAX_FLASH_DEVICE void load_global(u32 (&x)[1][2], const Element* from, bool valid) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p ld.global.v2.u32 {%0, %1}, [%2];}"
               : "+r"(x[0][0]), "+r"(x[0][1])
               : "l"(from), "r"(static_cast<int>(valid))
               : "memory");
}
JAX_FLASH_DEVICE void load_global(u32 (&x)[2][2], const Element* from, bool valid) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(x[0][0]), "+r"(x[0][1]), "+r"(x[1][0]), "+r"(x[1][1])
               : "l"(from), "r"(static_cast<int>(valid))
               : "memory");
}

}  // namespace jax_flash
