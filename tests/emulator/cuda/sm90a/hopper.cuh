// In place of csrc/cuda/sm90a/hopper.cuh.
#pragma once

#include "cuda/device/hardware_lanes.cuh"
#include "cuda/device/lanes.cuh"
#include "cuda/device/named_barriers.cuh"
#include "cuda/device/prelude.cuh"
#include "cuda/sm90a/operands.cuh"
#include "cuda/tensor_maps.h"

namespace jax_flash {

constexpr int warpgroup = 128;

inline void barrier_init(u32 barrier, u32 arrivals, EMULATOR_SITE) { emulator::barrier_init(barrier, arrivals, site); }
inline void barriers_ready() {}
inline void barrier_arrive(u32 barrier, EMULATOR_SITE) { emulator::barrier_arrive(barrier, 1, site); }
inline void barrier_arrive(u32 barrier, u32 count, EMULATOR_SITE) { emulator::barrier_arrive(barrier, count, site); }
inline void barrier_expect(u32 barrier, u32 bytes, EMULATOR_SITE) { emulator::barrier_expect(barrier, bytes, site); }
inline void barrier_arrive_behind_copies(u32 barrier, EMULATOR_SITE) {
  emulator::barrier_arrive_behind_chunks(barrier, site);
}
inline void barrier_wait(u32 barrier, u32 parity, EMULATOR_SITE) { emulator::barrier_wait(barrier, parity, site); }

template <int registers>
void warpgroup_reg_dealloc(EMULATOR_SITE) {
  emulator::registers(registers, false, site);
}
template <int registers>
void warpgroup_reg_alloc(EMULATOR_SITE) {
  emulator::registers(registers, true, site);
}

inline void stores_ready(EMULATOR_SITE) { emulator::proxy_fence(site); }
inline void global_stores_ready() {}

inline void prefetch_map(const TensorMap*) {}
inline void copy_box(u32 to, const TensorMap* map, u32 barrier, int column, int row, int head, int batch,
                     EMULATOR_SITE) {
  emulator::copy_box(to, map, barrier, column, row, head, batch, site);
}

inline void add_bulk(float* to, u32 from, u32 bytes, EMULATOR_SITE) { emulator::add_bulk(to, from, bytes, site); }
inline void store_bulk(void* to, u32 from, u32 bytes, EMULATOR_SITE) { emulator::store_bulk(to, from, bytes, site); }
inline void store_box(const TensorMap* map, u32 from, int column, int row, int head, int batch, EMULATOR_SITE) {
  emulator::store_box(map, from, column, row, head, batch, site);
}
inline void bulk_commit() { emulator::bulk_commit(); }
template <int pending>
void bulk_wait_read(EMULATOR_SITE) {
  emulator::bulk_wait_read(pending, site);
}
template <int pending>
void bulk_wait(EMULATOR_SITE) {
  emulator::bulk_wait(pending, site);
}

inline void add_four(float* to, const FragmentC& c, bool valid) {
  for (int i = 0; valid && i < 4; ++i) to[i] += c.x[i];
}

inline void store_matrices_of(u32 address, const u32 (&x)[4], bool transposed, const emulator::Site& site) {
  struct {
    u32 x[4], address;
  } mine = {{x[0], x[1], x[2], x[3]}, address};
  emulator::shared(address, 16, site);
  const char* all = emulator::exchange(&mine, sizeof(mine), site);
  // Each lane stores the row that it gives the address of.
  const u32 lane = emulator::thread() % 32, matrix = lane / 8, row = lane % 8;
  char* to = emulator::shared(address, 16, site);
  for (u32 column = 0; column < 8; ++column) {
    const u32 holder = transposed ? column * 4 + row / 2 : row * 4 + column / 2;
    __builtin_memcpy(to + 2 * column, all + 64 * holder + 4 * matrix + 2 * ((transposed ? row : column) % 2), 2);
  }
  emulator::written(address, 16);
}
inline void store_matrices(u32 address, const u32 (&x)[4], EMULATOR_SITE) {
  store_matrices_of(address, x, false, site);
}
inline void store_transposed(u32 address, const u32 (&x)[4], EMULATOR_SITE) {
  store_matrices_of(address, x, true, site);
}

inline void wgmma_fence(EMULATOR_SITE) { emulator::products_fence(site); }
inline void wgmma_commit() { emulator::products_commit(); }
template <int pending>
void wgmma_wait(EMULATOR_SITE) {
  emulator::products_wait(pending, site);
}
template <int n>
void hold(FragmentC (&)[n]) {}
template <int n>
void hold(u32 (&)[n][4]) {}

template <bool a_by_columns, bool b_by_columns, int tiles>
void wgmma(FragmentC (&c)[tiles], u64 a, u64 b, bool accumulate, EMULATOR_SITE) {
  static_assert(tiles % 2 == 0 && tiles <= 32);
  emulator::product({8 * tiles, dtype == DType::bf16, false, a_by_columns, b_by_columns, accumulate, a, b, {}, c[0].x},
                    site);
}
template <bool b_by_columns, int tiles>
void wgmma(FragmentC (&c)[tiles], const u32 (&a)[4], u64 b, bool accumulate, EMULATOR_SITE) {
  static_assert(tiles % 2 == 0 && tiles <= 32);
  emulator::product(
      {8 * tiles, dtype == DType::bf16, true, false, b_by_columns, accumulate, 0, b, {a[0], a[1], a[2], a[3]}, c[0].x},
      site);
}

}  // namespace jax_flash
