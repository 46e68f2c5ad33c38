// Arithmetic by inline PTX. It stands here, so that a build for the host can put another file of this name in place
// (tests/emulator).
#pragma once

namespace jax_flash {

static __device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

static __device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

static __device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

static __device__ __forceinline__ float half_to_float(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// Rounded to nearest, ties to even; infinite from 65520 on.
static __device__ __forceinline__ unsigned short float_to_half(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// From global memory, ordered before what this thread and those that it meets afterwards read there.
static __device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// To two floats in global memory, at a multiple of 8 bytes.
static __device__ __forceinline__ void add_pair(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
  atomicAdd(to, x);
  atomicAdd(to + 1, y);
#endif
}

}  // namespace jax_flash
