// wgmma's descriptors of operands in shared memory.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// A wgmma operand in shared memory, in slabs [rows][64 columns] as copy_box writes them, from `address` on.
//   by_rows:     A [m, k] or B [n, k]. Its 16 k lie in one slab; the next ones 32 bytes on, and row r, a multiple of 8,
//                128 * r bytes on.
//   by_columns:  A [k, m] or B [k, n], transposed on the way. More than 64 m or n go on in the next slab, slab_bytes
//                away; the next 16 k lie 2048 bytes on.
JAX_FLASH_DEVICE u64 by_rows(u32 address) {
  constexpr u32 swizzle_128 = 1u << 30, group_of_8_rows = 1024;
  return static_cast<u64>(swizzle_128 | group_of_8_rows >> 4) << 32 | (1u << 16 | (address & 0x3ffff) >> 4);
}
JAX_FLASH_DEVICE u64 by_columns(u32 address, u32 slab_bytes) {
  constexpr u32 swizzle_128 = 1u << 30, group_of_8_rows = 1024;
  return static_cast<u64>(swizzle_128 | group_of_8_rows >> 4) << 32 |
         (slab_bytes >> 4 << 16 | (address & 0x3ffff) >> 4);
}
JAX_FLASH_DEVICE u64 moved(u64 operand, u32 bytes) { return operand + (bytes >> 4); }

}  // namespace jax_flash
