// CUDA's words for a build of the device sources by the host's compiler. Inline PTX is left out: what it does is in the
// files here that take the place of csrc/cuda/device/{opaque,arithmetic,named_barriers,pack,shared_memory}.cuh,
// csrc/cuda/sm80/instructions.cuh and csrc/cuda/sm90a/hopper.cuh. What accesses shared memory by a pointer is seen by
// the calls that -fsanitize=thread makes of every access.
#pragma once

#include <string.h>

#include "emulator.h"

// `asm("...")` becomes nothing, and `asm volatile("...")` an empty asm.
#define asm(...) (void)0
#define volatile(...) ("")

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 800  // what stands behind `#if __CUDA_ARCH__ >= 900` is inline PTX: clusters, additions of four
#endif

#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__  // of one block at a time: what is static, and `memory`
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes)
#define __launch_bounds__(...)

inline void check(bool condition, const char* otherwise, EMULATOR_SITE) {
  if (!condition) emulator::fail(otherwise, site);
}
#define JAX_FLASH_ASSERT(condition, otherwise) check(condition, otherwise)

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <unsigned (*get)()>
struct Index {
  struct X {
    operator unsigned() const { return get(); }
  } x;
};
inline Index<emulator::thread> threadIdx;
inline Index<emulator::threads> blockDim;
inline Index<emulator::block> blockIdx;
inline Index<emulator::blocks> gridDim;

inline unsigned long long __cvta_generic_to_shared(const void* p) { return emulator::address_of(p); }
inline void __syncthreads(EMULATOR_SITE) { emulator::named_barrier(0, emulator::threads(), true, site); }
inline void __syncwarp(unsigned mask = ~0u, EMULATOR_SITE) {
  if (mask != ~0u) emulator::fail("a barrier of some lanes of a warp", site);
  emulator::exchange(&mask, 0, site);
}

template <typename T>
T from_lane(unsigned mask, T x, unsigned lane, const emulator::Site& site) {
  if (mask != ~0u) emulator::fail("a shuffle of some lanes of a warp", site);
  T y;
  __builtin_memcpy(&y, emulator::exchange(&x, sizeof(x), site) + 64 * (lane % 32), sizeof(y));
  return y;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int other, int = 32, EMULATOR_SITE) {
  return from_lane(mask, x, emulator::thread() ^ other, site);
}
template <typename T>
T __shfl_sync(unsigned mask, T x, int lane, int width = 32, EMULATOR_SITE) {
  return from_lane(mask, x, (emulator::thread() % 32 & -width) | (lane & (width - 1)), site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, int distance, int = 32, EMULATOR_SITE) {
  const unsigned lane = emulator::thread() % 32;
  return from_lane(mask, x, lane + distance < 32 ? lane + distance : lane, site);
}
inline unsigned __ballot_sync(unsigned mask, bool x, EMULATOR_SITE) {
  if (mask != ~0u) emulator::fail("a ballot of some lanes of a warp", site);
  const char* all = emulator::exchange(&x, sizeof(x), site);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[64 * lane]) << lane;
  return bits;
}
inline bool __any_sync(unsigned mask, bool x, EMULATOR_SITE) { return __ballot_sync(mask, x, site) != 0; }
inline bool __all_sync(unsigned mask, bool x, EMULATOR_SITE) { return __ballot_sync(mask, x, site) == ~0u; }

template <typename Of>
unsigned reduced(unsigned mask, unsigned x, const Of& of, const emulator::Site& site) {
  if (mask != ~0u) emulator::fail("a reduction over some lanes of a warp", site);
  const char* all = emulator::exchange(&x, sizeof(x), site);
  for (int lane = 0; lane < 32; ++lane) {
    unsigned other;
    __builtin_memcpy(&other, all + 64 * lane, sizeof(other));
    x = of(x, other);
  }
  return x;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x, EMULATOR_SITE) {
  return reduced(mask, x, [](unsigned a, unsigned b) { return a < b ? b : a; }, site);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned x, EMULATOR_SITE) {
  return reduced(mask, x, [](unsigned a, unsigned b) { return a < b ? a : b; }, site);
}

inline float atomicAdd(float* to, float x) {
  const float before = *to;
  *to += x;
  return before;
}
inline int atomicAdd(int* to, int x) {
  const int before = *to;
  *to += x;
  return before;
}
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long x) {
  const unsigned long long before = *to;
  *to += x;
  return before;
}
inline unsigned atomicOr(unsigned* to, unsigned x) {
  const unsigned before = *to;
  *to |= x;
  return before;
}
inline void __threadfence() {}
// Blocks run one after the other, so what a block looks for is there at once or never.
inline void __nanosleep(unsigned, EMULATOR_SITE) { emulator::fail("a wait for what no block before has done", site); }

inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fminf(float x, float y) { return __builtin_fminf(x, y); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
#define EMULATOR_FLOAT(name) \
  inline float name(float x) { return __builtin_##name(x); }
EMULATOR_FLOAT(expf)
EMULATOR_FLOAT(exp2f)
EMULATOR_FLOAT(logf)
EMULATOR_FLOAT(log1pf)
EMULATOR_FLOAT(expm1f)
EMULATOR_FLOAT(sinf)
EMULATOR_FLOAT(cosf)
EMULATOR_FLOAT(tanf)
EMULATOR_FLOAT(sinhf)
EMULATOR_FLOAT(coshf)
EMULATOR_FLOAT(asinf)
EMULATOR_FLOAT(acosf)
EMULATOR_FLOAT(atanf)
EMULATOR_FLOAT(asinhf)
EMULATOR_FLOAT(acoshf)
EMULATOR_FLOAT(atanhf)
EMULATOR_FLOAT(cbrtf)
EMULATOR_FLOAT(erff)
EMULATOR_FLOAT(erfcf)
EMULATOR_FLOAT(floorf)
EMULATOR_FLOAT(ceilf)
EMULATOR_FLOAT(roundf)
EMULATOR_FLOAT(rintf)
#undef EMULATOR_FLOAT
inline float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
inline float powf(float x, float y) { return __builtin_powf(x, y); }
inline float fmodf(float x, float y) { return __builtin_fmodf(x, y); }
inline float atan2f(float x, float y) { return __builtin_atan2f(x, y); }
inline float log2f(float x) { return __builtin_log2f(x); }
inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline int __double2int_rd(double x) { return static_cast<int>(__builtin_floor(x)); }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
