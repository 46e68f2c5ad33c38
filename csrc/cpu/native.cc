// Prints the instruction sets that this machine's processor takes, as a list of CMake's: for a build that is for this
// machine alone (JAX_FLASH_CPU_ISAS=native). The build itself runs it.
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "choice.h"

int main() {
  std::vector<std::string_view> usable;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
#if __GNUC__ >= 11
  // Whether the system lets a process use the tiles is known when it runs; where it does not, the next set serves.
  if (pairs && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16")) usable.push_back("amx_bf16");
#endif
  if (pairs) usable.push_back("avx512_bf16");
  if (avx512) usable.push_back("avx512");
  if (avx2) usable.push_back("avx2");
#elif defined(__aarch64__)
  usable.push_back("neon");
#endif
#if !defined(__aarch64__)
  usable.push_back("baseline");
#endif
  const jax_flash::cpu::Choice choice = jax_flash::cpu::choose(jax_flash::cpu::this_processor(), usable);
  std::printf("%s;%s", std::string(choice.bf16).c_str(), std::string(choice.others).c_str());
}
