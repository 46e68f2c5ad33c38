// Which instruction sets serve a process: a pure function of the processor and of what may be used there.
// The choice for bfloat16 is a table of processors, not a measurement at run time: on one machine every process must
// compute the same bits, no matter what else runs there.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jax_flash::cpu {

// From CPUID: the vendor's 12 letters, and family and model with their extensions. Empty and 0 on other architectures.
struct Processor {
  std::string vendor;
  int family = 0, model = 0;
};

inline Processor this_processor() {
  Processor processor;
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return processor;
  for (unsigned letters : {ebx, edx, ecx}) {
    processor.vendor.append(reinterpret_cast<const char*>(&letters), sizeof(letters));
  }
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  processor.family = static_cast<int>(eax >> 8 & 15);
  processor.model = static_cast<int>((eax >> 4 & 15) | (eax >> 12 & 0xf0));
  if (processor.family == 15) processor.family += static_cast<int>(eax >> 20 & 255);
#endif
  return processor;
}

// What this processor and its operating system support of x86-64: AVX2, AVX-512, products of pairs, and tiles, which
// the system has to grant to a process besides. f16c and AMX are read from CPUID, because __builtin_cpu_supports() of
// clang 15 and 16 does not know their names.
struct Features {
  bool avx2 = false, avx512 = false, pairs = false, tiles = false;
};

inline Features these_features() {
  Features has;
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kF16c = 1u << 29, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & kF16c);
  const bool amx = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAmxBf16) && (edx & kAmxTile);
  has.avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  has.avx512 = has.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  has.pairs = has.avx512 && __builtin_cpu_supports("avx512bf16");
  has.tiles = has.pairs && amx;
#endif
  return has;
}

struct InstructionSet {
  std::string_view name;
  bool bf16_only;  // other dtypes are served by the next set
};

// Best first, except that fast_pairs() may put avx512 before avx512_bf16.
constexpr std::array<InstructionSet, 6> kInstructionSets = {{{"amx_bf16", true},
                                                             {"avx512_bf16", true},
                                                             {"avx512", false},
                                                             {"avx2", false},
                                                             {"neon", false},
                                                             {"baseline", false}}};

// Whether AVX512-BF16, products of pairs, is faster than AVX-512, products of floats, for bfloat16. A processor in no
// row counts as slow: if that is wrong, bfloat16 runs at the rate of float32, while the opposite error may cost half of
// it.
inline bool fast_pairs(const Processor& processor) {
  struct Row {
    std::string_view vendor;
    int family, first_model, last_model;
    bool fast;
  };
  constexpr int kAny = 255;
  // AMD's cores make twice as many products of pairs a second as of floats, Intel's half as many: calls by AVX512-BF16
  // have 1.7 to 1.9 times the rate of AVX-512 (Zen 4, docs/ledger/cpu-zen4-zen3.md), and 0.6 of it (Emerald Rapids,
  // docs/ledger/cpu-emerald-rapids.md).
  constexpr Row kRows[] = {
      {"AuthenticAMD", 0x19, 0, kAny, true},   // Zen 4; Zen 3 does not have the instructions
      {"AuthenticAMD", 0x1a, 0, kAny, true},   // Zen 5
      {"GenuineIntel", 6, 0x8f, 0x8f, false},  // Sapphire Rapids
      {"GenuineIntel", 6, 0xad, 0xae, false},  // Granite Rapids
      {"GenuineIntel", 6, 0xcf, 0xcf, false},  // Emerald Rapids
  };
  for (const Row& row : kRows) {
    if (row.vendor == processor.vendor && row.family == processor.family && row.first_model <= processor.model &&
        processor.model <= row.last_model) {
      return row.fast;
    }
  }
  return false;
}

// Names of sets: for bfloat16, and for the other dtypes. Empty if there is none.
struct Choice {
  std::string_view bf16, others;
};

// The sets for a processor that may use those in `usable`: the best ones. If `wanted` is not empty, that one, and for
// dtypes that it does not serve the best of those after it.
inline Choice choose(const Processor& processor, const std::vector<std::string_view>& usable,
                     std::string_view wanted = {}) {
  Choice choice;
  for (const InstructionSet& set : kInstructionSets) {
    if (std::find(usable.begin(), usable.end(), set.name) == usable.end()) continue;
    if (choice.bf16.empty()) {
      if (!wanted.empty() ? set.name != wanted : set.name == "avx512_bf16" && !fast_pairs(processor)) continue;
      choice.bf16 = set.name;
    }
    if (set.bf16_only) continue;
    choice.others = set.name;
    break;
  }
  return choice;
}

}  // namespace jax_flash::cpu
