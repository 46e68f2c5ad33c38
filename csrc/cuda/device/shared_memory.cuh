// Every instruction that takes an address of shared memory. All of them stand here, so that a build for the host can
// put another file of this name in place, which writes down what each lane accesses (tests/bank_conflicts).
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// ldmatrix: four 8 x 8 matrices of 16-bit elements, of which eight lanes each address the rows of one.
JAX_FLASH_DEVICE void load_matrices(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}
JAX_FLASH_DEVICE void load_transposed(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

JAX_FLASH_DEVICE void load_shared(u32 (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

JAX_FLASH_DEVICE void load_shared(float2& x, u32 address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
}

JAX_FLASH_DEVICE void store_shared(u32 address, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
JAX_FLASH_DEVICE void store_shared(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// cp.async: 16 bytes or a float from global to shared memory; where not `valid`, zeros.
JAX_FLASH_DEVICE void copy_async(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
JAX_FLASH_DEVICE void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Or nothing at all, without a branch.
JAX_FLASH_DEVICE void copy_async_if(bool wanted, u32 to, const void* from) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to),
               "l"(from), "r"(static_cast<int>(wanted))
               : "memory");
}
JAX_FLASH_DEVICE void copy_async_float(u32 to, const float* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

}  // namespace jax_flash
