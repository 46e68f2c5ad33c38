// In place of csrc/cuda/device/arithmetic.cuh.
#pragma once

namespace jax_flash {

inline float exp2_approx(float x) { return __builtin_exp2f(x); }
inline float log2_approx(float x) { return __builtin_log2f(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline float half_to_float(unsigned short x) { return emulator::half_to_float(x); }
inline unsigned short float_to_half(float x) { return emulator::float_to_half(x); }

inline int load_acquire(const int* from) { return *from; }

inline void add_pair(float* to, float x, float y) {
  atomicAdd(to, x);
  atomicAdd(to + 1, y);
}

}  // namespace jax_flash
