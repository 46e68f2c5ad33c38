// wgmma's descriptors of operands in shared memory.
#pragma once

#include "cuda/device/prelude.cuh"

namespace jax_flash {

// A wgmma operand in shared memory, in slabs [rows][64 columns] as copy_box writes them, from `address` on.
//   by_rows:     A [m, k] or B [n, k]. Its 16 k lie in one slab; the next ones 32 bytes on, and row r, a multiple of 8,
//                128 * r bytes on.
//   by_columns:  A [k, m] or B [k, n], transposed on the way. More than 64 m or n go on in the next slab, slab_bytes
//                away; the next 16 k lie 2048 bytes on.
//
// The high word, the same in all: a swizzle of 128 bytes, and how far apart groups of 8 rows are. Beside a block mask
// the compiler is not to know its value: it would add to a descriptor in two halves, four or five instructions between
// products where one is enough. In the other kernels it adds as it should; at head_dim 256, and in the passes of which
// one is for dQ alone, it has no register for the word, and spills.
constexpr bool opaque_layout = has_mask_blocks && !option_separate_dq && JAX_FLASH_LARGEST_HEAD_DIM <= 128;
constexpr u32 operand_layout = 1u << 30 | 1024 >> 4;
extern "C" __constant__ u32 jax_flash_operand_layout = operand_layout;
JAX_FLASH_DEVICE u64 operand_of(u32 low) {
  return static_cast<u64>(opaque_layout ? jax_flash_operand_layout : operand_layout) << 32 | low;
}
JAX_FLASH_DEVICE u64 by_rows(u32 address) { return operand_of(1u << 16 | (address & 0x3ffff) >> 4); }
JAX_FLASH_DEVICE u64 by_columns(u32 address, u32 slab_bytes) {
  return operand_of(slab_bytes >> 4 << 16 | (address & 0x3ffff) >> 4);
}
JAX_FLASH_DEVICE u64 moved(u64 operand, u32 bytes) { return operand + (bytes >> 4); }

}  // namespace jax_flash
