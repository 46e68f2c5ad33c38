// The micro-kernel of csrc/cpu/gemm.h on tiles that stay in L1, compared with the same loop in intrinsics: what the
// vectors of csrc/cpu/vectors.h cost. Prints GFLOP/s of both, on one thread.
#include "../../csrc/cpu/gemm.h"

#include <algorithm>
#include <cstdio>
#include <ctime>

namespace {

using namespace jax_flash::cpu::JAX_FLASH_ISA;

constexpr int kDepth = 64;
constexpr int kColumns = kPanel<float>;
alignas(64) float a[kRows * kDepth], b[kDepth * kColumns], c[kRows * kColumns];

__attribute__((noinline)) void ours() {
  micro_kernel<kVecs, Layout::row_major>(kDepth, a, kDepth, b, kColumns,
                                         [](int i, int v, const Vec<float>& sum) __attribute__((always_inline)) {
                                           store<float>(c + i * kColumns + v * kWidth<float>, sum);
                                         });
}

#if defined(__AVX512F__)
__attribute__((noinline)) void intrinsics() {
  __m512 sums[8][3];
#pragma GCC unroll 8
  for (auto& row : sums) row[0] = row[1] = row[2] = _mm512_setzero_ps();
  for (int k = 0; k < kDepth; ++k) {
    const float* row = b + k * kColumns;
    __m512 first = _mm512_load_ps(row), second = _mm512_load_ps(row + 16), third = _mm512_load_ps(row + 32);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      __m512 factor = _mm512_set1_ps(a[i * kDepth + k]);
      sums[i][0] = _mm512_fmadd_ps(factor, first, sums[i][0]);
      sums[i][1] = _mm512_fmadd_ps(factor, second, sums[i][1]);
      sums[i][2] = _mm512_fmadd_ps(factor, third, sums[i][2]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < 3; ++v) _mm512_store_ps(c + i * kColumns + v * 16, sums[i][v]);
  }
}
#endif

double rate(void (*kernel)()) {
  auto now = [] {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  constexpr int kCalls = 20000;
  double best = 1e9;
  for (int round = 0; round < 40; ++round) {
    double begin = now();
    for (int call = 0; call < kCalls; ++call) {
      kernel();
      asm volatile(""
                   :
                   : "r"(a), "r"(b), "r"(c)
                   : "memory");  // else the compiler knows the factors and drops the result
    }
    best = std::min(best, (now() - begin) / kCalls);
  }
  return 2e-9 * kRows * kColumns * kDepth / best;
}

}  // namespace

int main() {
  std::printf("vectors.h %.2f GFLOP/s\n", rate(ours));
#if defined(__AVX512F__)
  std::printf("intrinsics %.2f GFLOP/s\n", rate(intrinsics));
#endif
}
