// What a study kernel gets (cuda/study). Compiled by the host compiler and by NVRTC, so it includes nothing.
#pragma once

namespace jax_flash {

constexpr int kStudyArrays = 12;
constexpr int kStudyThreads = 256;  // of a block

struct Study {
  void* arrays[kStudyArrays];  // arguments, and then results, in the order in which jax_flash/study/kernels.py has them
  int batch, rows, keys;
  int heads, kv_heads;  // of query, and of key and value
  float scale;          // of the scores
};

}  // namespace jax_flash
