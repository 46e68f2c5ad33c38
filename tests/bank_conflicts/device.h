// CUDA's keywords and intrinsics for building the device sources with the host's compiler. Threads run one after the
// other, so shuffles and barriers never wait, and inline PTX is left out unless addresses depend on it or it takes
// them: such PTX is replaced by the files cuda/device/opaque.cuh and shared_memory.cuh here. Accesses to shared memory
// through pointers are seen by the calls that -fsanitize=thread inserts for every access.
#pragma once

#include "record.h"

// `asm("...")` becomes nothing, and `asm volatile("...")` an empty asm.
#define asm(...) (void)0
#define volatile(...) ("")

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 800  // code for 9.0 and newer alone is inline PTX: clusters, additions of four
#endif

#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)

struct int2 {
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

struct ThreadIndex {
  struct X {
    operator unsigned() const { return record::thread(); }
  } x;
};
inline ThreadIndex threadIdx;
struct BlockIndex {
  unsigned x;
};
inline constexpr BlockIndex blockIdx{0};
inline constexpr BlockIndex gridDim{1};

inline unsigned long long __cvta_generic_to_shared(const void* p) { return record::address_of(p); }
inline void __syncthreads() { record::barrier(); }
inline void __syncwarp() {}
inline bool __any_sync(unsigned, bool) { return true; }  // so that what depends on it is counted
inline unsigned __ballot_sync(unsigned, bool x) { return x ? ~0u : 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
template <typename T>
T __shfl_xor_sync(unsigned, T x, int) {
  record::shuffle();
  return x;
}
template <typename T>
T __shfl_sync(unsigned, T x, int) {
  record::shuffle();
  return x;
}
template <typename T>
T __shfl_down_sync(unsigned, T x, int) {
  record::shuffle();
  return x;
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
inline float atomicAdd(float* to, float x) { return *to += x; }

inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fminf(float x, float y) { return __builtin_fminf(x, y); }
inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float log2f(float x) { return __builtin_log2f(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline int __double2int_rd(double x) { return static_cast<int>(__builtin_floor(x)); }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
