// In place of csrc/cuda/device/named_barriers.cuh.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

inline void named_sync(int barrier, int threads, EMULATOR_SITE) {
  emulator::named_barrier(barrier, threads, true, site);
}
inline void named_sync_unaligned(int barrier, int threads, EMULATOR_SITE) { named_sync(barrier, threads, site); }
inline void named_arrive(int barrier, int threads, EMULATOR_SITE) {
  emulator::named_barrier(barrier, threads, false, site);
}

}  // namespace jax_flash
