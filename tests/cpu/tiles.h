// The instructions of AMX-BF16 that csrc/cpu/tiles.h uses, as the processor's manual defines them, for processors
// without: 8 tiles of 16 rows of 64 bytes. Subnormals are kept here.
#pragma once

#include <immintrin.h>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jax_flash::cpu::emulated {
namespace {

thread_local uint32_t tiles[8][16][16];
thread_local bool configured = false;

inline void load(int tile, const void* from, ptrdiff_t stride) {
  if (!configured) __builtin_trap();
  for (int i = 0; i < 16; ++i) std::memcpy(tiles[tile][i], static_cast<const char*>(from) + i * stride, 64);
}

inline void store(int tile, void* to, ptrdiff_t stride) {
  if (!configured) __builtin_trap();
  for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(to) + i * stride, tiles[tile][i], 64);
}

inline void multiply(int c, int a, int b) {
  if (!configured) __builtin_trap();
  auto number = [](uint32_t bits) { return __builtin_bit_cast(float, bits); };
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      float even = 0, odd = 0;
      for (int k = 0; k < 16; ++k) {
        uint32_t left = tiles[a][row][k], right = tiles[b][k][column];
        even += number(left << 16) * number(right << 16);
        odd += number(left & 0xffff0000) * number(right & 0xffff0000);
      }
      tiles[c][row][column] = __builtin_bit_cast(uint32_t, number(tiles[c][row][column]) + (even + odd));
    }
  }
}

}  // namespace
}  // namespace jax_flash::cpu::emulated

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (static_cast<void>(config), emulated::configured = true)
#define _tile_release() (emulated::configured = false)
#define _tile_zero(tile) std::memset(emulated::tiles[tile], 0, sizeof(emulated::tiles[tile]))
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
