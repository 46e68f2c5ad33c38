// Prints the instruction sets that this machine's processor takes, as a list of CMake's: for a build that is for this
// machine alone (JAX_FLASH_CPU_ISAS=native). The build itself runs it.
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "choice.h"

int main() {
  std::vector<std::string_view> usable;
  const jax_flash::cpu::Features has = jax_flash::cpu::these_features();
  // Whether the system lets a process use the tiles is known when it runs; where it does not, the next set serves.
  if (has.tiles) usable.push_back("amx_bf16");
  if (has.pairs) usable.push_back("avx512_bf16");
  if (has.avx512) usable.push_back("avx512");
  if (has.avx2) usable.push_back("avx2");
#if defined(__aarch64__)
  usable.push_back("neon");
#else
  usable.push_back("baseline");
#endif
  const jax_flash::cpu::Choice choice = jax_flash::cpu::choose(jax_flash::cpu::this_processor(), usable);
  std::printf("%s;%s", std::string(choice.bf16).c_str(), std::string(choice.others).c_str());
}
