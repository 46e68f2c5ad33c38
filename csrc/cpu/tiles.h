// Products by AMX: tile registers of 16 rows of 64 bytes, and an instruction that multiplies two of them.
// Its operands are laid out as those of the micro-kernel in gemm.h: A has rows of pairs along the sum, B has a row of
// lanes for each pair. Arrays in another order are transposed: V, and in the backward q and dout.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(JAX_FLASH_EMULATED_TILES)  // by the tests, on processors without
#include JAX_FLASH_EMULATED_TILES
#endif

namespace jax_flash::cpu::JAX_FLASH_ISA {

#if defined(__AMX_BF16__)
template <typename F>
constexpr bool kTiled = kPaired<F>;
#else
template <typename F>
constexpr bool kTiled = false;
#endif
constexpr int kTileRows = 16;   // of A and of C
constexpr int kTilePairs = 16;  // of a row of A; rows of B

#if defined(__AMX_BF16__)
// Configures this thread's tiles in their largest shape. The destructor releases them, because the kernel saves 8 KB at
// every context switch of a thread that holds tiles.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");  // all of it is read
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

// C[rows][NV * 16] (+)= A * B for `rows` a multiple of kTileRows and `depth`, in pairs, one of kTilePairs. One row of
// tiles of C at a time: its NV = 3 or 4 sums hide the latency of the instruction (52 cycles, one in 16).
template <int NV>
void multiply_tiles(int rows, int depth, const Pair* a, ptrdiff_t a_stride, const Pair* b, ptrdiff_t b_stride, float* c,
                    ptrdiff_t c_stride, bool add) {
  static_assert(NV <= 4);
  // The compiler does not know that tiles are loaded from memory and stored there.
  asm volatile("" ::: "memory");
  ptrdiff_t a_bytes = a_stride * 4, b_bytes = b_stride * 4, c_bytes = c_stride * 4;
  for (int i = 0; i < rows; i += kTileRows) {
    float* sums = c + i * c_stride;
    if (add) {
      _tile_loadd(0, sums, c_bytes);
      if constexpr (NV > 1) _tile_loadd(1, sums + 16, c_bytes);
      if constexpr (NV > 2) _tile_loadd(2, sums + 32, c_bytes);
      if constexpr (NV > 3) _tile_loadd(3, sums + 48, c_bytes);
    } else {
      _tile_zero(0);
      if constexpr (NV > 1) _tile_zero(1);
      if constexpr (NV > 2) _tile_zero(2);
      if constexpr (NV > 3) _tile_zero(3);
    }
    for (int k = 0; k < depth; k += kTilePairs) {
      const Pair* rows_of_b = b + k * b_stride;
      _tile_loadd(4, a + i * a_stride + k, a_bytes);
      _tile_loadd(5, rows_of_b, b_bytes);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (NV > 1) {
        _tile_loadd(6, rows_of_b + 16, b_bytes);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (NV > 2) {
        _tile_loadd(7, rows_of_b + 32, b_bytes);
        _tile_dpbf16ps(2, 4, 7);
      }
      if constexpr (NV > 3) {
        _tile_loadd(5, rows_of_b + 48, b_bytes);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, sums, c_bytes);
    if constexpr (NV > 1) _tile_stored(1, sums + 16, c_bytes);
    if constexpr (NV > 2) _tile_stored(2, sums + 32, c_bytes);
    if constexpr (NV > 3) _tile_stored(3, sums + 48, c_bytes);
  }
  asm volatile("" ::: "memory");
}
#endif

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
