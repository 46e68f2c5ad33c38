// In place of csrc/cuda/device/shared_memory.cuh: nothing is loaded or stored, but every access is written down.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

using record::access;
using record::Instruction;
using record::Site;

inline void load_matrices(u32 (&)[4], u32 address, Site site = RECORD_SITE) {
  access(Instruction::load_matrices, address, 64, site);
}
inline void load_transposed(u32 (&)[4], u32 address, Site site = RECORD_SITE) {
  access(Instruction::load_transposed, address, 64, site);
}

inline void load_shared(u32 (&)[4], u32 address, Site site = RECORD_SITE) {
  access(Instruction::load, address, 16, site);
}

inline void load_shared(float2&, u32 address, Site site = RECORD_SITE) { access(Instruction::load, address, 8, site); }

inline void store_shared(u32 address, const uint4&, Site site = RECORD_SITE) {
  access(Instruction::store, address, 16, site);
}
inline void store_shared(u32 address, u32, Site site = RECORD_SITE) { access(Instruction::store, address, 4, site); }

inline void copy_async(u32 to, const void*, bool, Site site = RECORD_SITE) {
  access(Instruction::copy_async, to, 16, site);
}
inline void copy_async(u32 to, const void*, Site site = RECORD_SITE) { access(Instruction::copy_async, to, 16, site); }
inline void copy_async_if(bool wanted, u32 to, const void*, Site site = RECORD_SITE) {
  if (wanted) access(Instruction::copy_async, to, 16, site);
}
inline void copy_async_float(u32 to, const float*, bool, Site site = RECORD_SITE) {
  access(Instruction::copy_async, to, 4, site);
}

}  // namespace jax_flash
