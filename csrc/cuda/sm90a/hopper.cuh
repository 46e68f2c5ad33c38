// Hopper's own instructions: mbarriers, TMA, wgmma. Every instruction that takes an address of shared memory, an
// mbarrier or a descriptor stands here, so that a build for the host can put another file of this name in place.
#pragma once

#include "cuda/device/hardware_lanes.cuh"
#include "cuda/device/lanes.cuh"
#include "cuda/device/named_barriers.cuh"
#include "cuda/device/prelude.cuh"
#include "cuda/sm90a/operands.cuh"
#include "cuda/tensor_maps.h"

namespace jax_flash {

constexpr int warpgroup = 128;  // threads

// mbarriers, of 8 bytes each in shared memory. A phase completes when all arrivals that it counts and all bytes that it
// expects are there; its number modulo 2 is its parity. Waiting for parity 1 of a new mbarrier returns at once.
JAX_FLASH_DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes new mbarriers visible to TMA; other threads see them after __syncthreads().
JAX_FLASH_DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
JAX_FLASH_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// For so many threads.
JAX_FLASH_DEVICE void barrier_arrive(u32 barrier, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Arrives, and makes the phase wait for so many bytes of copies too.
JAX_FLASH_DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives when all that this thread has asked for by copy_async() is there.
JAX_FLASH_DEVICE void barrier_arrive_behind_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
JAX_FLASH_DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// setmaxnreg moves registers between warpgroups: all warps of one state how many a thread needs, a multiple of 8.
template <int registers>
JAX_FLASH_DEVICE void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
JAX_FLASH_DEVICE void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Makes this thread's stores to shared memory visible to wgmma and TMA that start after the next barrier; and what
// copy_async() has brought, after a wait for it, to its own wgmma.
JAX_FLASH_DEVICE void stores_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same of stores to global memory, and additions by TMA.
JAX_FLASH_DEVICE void global_stores_ready() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

JAX_FLASH_DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Loads a box of kBoxColumns columns into shared memory by TMA, to an address that is a multiple of 1024; its bytes
// count at the mbarrier `barrier`.
JAX_FLASH_DEVICE void copy_box(u32 to, const TensorMap* map, u32 barrier, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Adds floats in shared memory to floats in global memory by TMA, or stores bytes there, both at multiples of 16 bytes;
// or stores a box. A thread starts such copies, commits them as a group, and waits for its groups: till their shared
// memory has been read, or till they are done.
JAX_FLASH_DEVICE void add_bulk(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
JAX_FLASH_DEVICE void store_bulk(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
JAX_FLASH_DEVICE void store_box(const TensorMap* map, u32 from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
JAX_FLASH_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int pending>
JAX_FLASH_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
template <int pending>
JAX_FLASH_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// Adds to four floats in global memory, at a multiple of 16 bytes, if `valid`: a predicate and no branch, for which the
// assembler would wait for the wgmma that are under way.
JAX_FLASH_DEVICE void add_four(float* to, const FragmentC& c, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %5, 0;\n"
      "@valid red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(to),
      "f"(c.x[0]), "f"(c.x[1]), "f"(c.x[2]), "f"(c.x[3]), "r"(static_cast<u32>(valid))
      : "memory");
}

// stmatrix: four 8 x 8 matrices of 16-bit elements, of which eight lanes each address the rows (or the columns) of one.
JAX_FLASH_DEVICE void store_matrices(u32 address, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
JAX_FLASH_DEVICE void store_transposed(u32 address, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// wgmma runs asynchronously: fence() before the first, and wherever registers that one reads have been written;
// commit() ends a group; wait<n>() waits till at most n groups are under way. Until then their accumulators and their A
// in registers are not touched: the compiler knows nothing of it, so hold() names them after the wait.
JAX_FLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
JAX_FLASH_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
JAX_FLASH_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
template <int n>
JAX_FLASH_DEVICE void hold(FragmentC (&c)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    asm volatile("" : "+f"(c[i].x[0]), "+f"(c[i].x[1]), "+f"(c[i].x[2]), "+f"(c[i].x[3])::"memory");
  }
}
template <int n>
JAX_FLASH_DEVICE void hold(u32 (&a)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// wgmma: c = A B, or with `accumulate` c += A B, of A 64 x 16 and B 16 x n. Warp w of the warpgroup has rows 16 w to
// 16 w + 15, as FragmentC says; and so it has those of an A in registers, two neighbouring accumulators of 16 bits a
// word being one. There is one for every n that is a multiple of 16:
//   template <bool a_by_columns, bool b_by_columns> void wgmma(FragmentC (&c)[n / 8], u64 a, u64 b, bool accumulate)
//   template <bool b_by_columns> void wgmma(FragmentC (&c)[n / 8], const u32 (&a)[4], u64 b, bool accumulate)

#define JAX_FLASH_TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAX_FLASH_TEXT_32 JAX_FLASH_TEXT_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_FLASH_TEXT_48 JAX_FLASH_TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JAX_FLASH_TEXT_64 JAX_FLASH_TEXT_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_FLASH_TEXT_80 JAX_FLASH_TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JAX_FLASH_TEXT_96 JAX_FLASH_TEXT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_FLASH_TEXT_112 JAX_FLASH_TEXT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JAX_FLASH_TEXT_128 JAX_FLASH_TEXT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_FLASH_TEXT_144 JAX_FLASH_TEXT_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define JAX_FLASH_TEXT_160 JAX_FLASH_TEXT_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define JAX_FLASH_TEXT_176 JAX_FLASH_TEXT_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define JAX_FLASH_TEXT_192 JAX_FLASH_TEXT_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_FLASH_TEXT_208 JAX_FLASH_TEXT_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define JAX_FLASH_TEXT_224 JAX_FLASH_TEXT_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define JAX_FLASH_TEXT_240 JAX_FLASH_TEXT_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define JAX_FLASH_TEXT_256 JAX_FLASH_TEXT_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_FLASH_WORDS(i) "+f"(c[i].x[0]), "+f"(c[i].x[1]), "+f"(c[i].x[2]), "+f"(c[i].x[3])
#define JAX_FLASH_C_16 JAX_FLASH_WORDS(0), JAX_FLASH_WORDS(1)
#define JAX_FLASH_C_32 JAX_FLASH_C_16, JAX_FLASH_WORDS(2), JAX_FLASH_WORDS(3)
#define JAX_FLASH_C_48 JAX_FLASH_C_32, JAX_FLASH_WORDS(4), JAX_FLASH_WORDS(5)
#define JAX_FLASH_C_64 JAX_FLASH_C_48, JAX_FLASH_WORDS(6), JAX_FLASH_WORDS(7)
#define JAX_FLASH_C_80 JAX_FLASH_C_64, JAX_FLASH_WORDS(8), JAX_FLASH_WORDS(9)
#define JAX_FLASH_C_96 JAX_FLASH_C_80, JAX_FLASH_WORDS(10), JAX_FLASH_WORDS(11)
#define JAX_FLASH_C_112 JAX_FLASH_C_96, JAX_FLASH_WORDS(12), JAX_FLASH_WORDS(13)
#define JAX_FLASH_C_128 JAX_FLASH_C_112, JAX_FLASH_WORDS(14), JAX_FLASH_WORDS(15)
#define JAX_FLASH_C_144 JAX_FLASH_C_128, JAX_FLASH_WORDS(16), JAX_FLASH_WORDS(17)
#define JAX_FLASH_C_160 JAX_FLASH_C_144, JAX_FLASH_WORDS(18), JAX_FLASH_WORDS(19)
#define JAX_FLASH_C_176 JAX_FLASH_C_160, JAX_FLASH_WORDS(20), JAX_FLASH_WORDS(21)
#define JAX_FLASH_C_192 JAX_FLASH_C_176, JAX_FLASH_WORDS(22), JAX_FLASH_WORDS(23)
#define JAX_FLASH_C_208 JAX_FLASH_C_192, JAX_FLASH_WORDS(24), JAX_FLASH_WORDS(25)
#define JAX_FLASH_C_224 JAX_FLASH_C_208, JAX_FLASH_WORDS(26), JAX_FLASH_WORDS(27)
#define JAX_FLASH_C_240 JAX_FLASH_C_224, JAX_FLASH_WORDS(28), JAX_FLASH_WORDS(29)
#define JAX_FLASH_C_256 JAX_FLASH_C_240, JAX_FLASH_WORDS(30), JAX_FLASH_WORDS(31)

#define JAX_FLASH_WGMMA_OF(n, type, predicate, operands, ...)                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " predicate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k16.f32." type "." type " {" JAX_FLASH_TEXT_##n "}, " operands ";\n}"                     \
               : JAX_FLASH_C_##n                                                                          \
               : __VA_ARGS__)
// i0 to i6 are the numbers of the operands behind the accumulators.
#define JAX_FLASH_WGMMA(n, i0, i1, i2, i3, i4, i5, i6)                                                             \
  template <bool a_by_columns, bool b_by_columns>                                                                  \
  JAX_FLASH_DEVICE void wgmma(FragmentC(&c)[n / 8], u64 a, u64 b, bool accumulate) {                               \
    if constexpr (dtype == DType::bf16) {                                                                          \
      JAX_FLASH_WGMMA_OF(n, "bf16", "%" #i2, "%" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4, "l"(a), "l"(b),       \
                         "r"(static_cast<u32>(accumulate)), "n"(a_by_columns), "n"(b_by_columns));                 \
    } else {                                                                                                       \
      JAX_FLASH_WGMMA_OF(n, "f16", "%" #i2, "%" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4, "l"(a), "l"(b),        \
                         "r"(static_cast<u32>(accumulate)), "n"(a_by_columns), "n"(b_by_columns));                 \
    }                                                                                                              \
  }                                                                                                                \
  template <bool b_by_columns>                                                                                     \
  JAX_FLASH_DEVICE void wgmma(FragmentC(&c)[n / 8], const u32(&a)[4], u64 b, bool accumulate) {                    \
    if constexpr (dtype == DType::bf16) {                                                                          \
      JAX_FLASH_WGMMA_OF(n, "bf16", "%" #i5, "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6, \
                         "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(accumulate)),    \
                         "n"(b_by_columns));                                                                       \
    } else {                                                                                                       \
      JAX_FLASH_WGMMA_OF(n, "f16", "%" #i5, "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6,  \
                         "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(accumulate)),    \
                         "n"(b_by_columns));                                                                       \
    }                                                                                                              \
  }
JAX_FLASH_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
JAX_FLASH_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
JAX_FLASH_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
JAX_FLASH_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
JAX_FLASH_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
JAX_FLASH_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
JAX_FLASH_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
JAX_FLASH_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
JAX_FLASH_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
JAX_FLASH_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
JAX_FLASH_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
JAX_FLASH_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
JAX_FLASH_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
JAX_FLASH_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
JAX_FLASH_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
JAX_FLASH_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
#undef JAX_FLASH_WGMMA
#undef JAX_FLASH_WGMMA_OF
#undef JAX_FLASH_WORDS
#undef JAX_FLASH_C_16
#undef JAX_FLASH_C_32
#undef JAX_FLASH_C_48
#undef JAX_FLASH_C_64
#undef JAX_FLASH_C_80
#undef JAX_FLASH_C_96
#undef JAX_FLASH_C_112
#undef JAX_FLASH_C_128
#undef JAX_FLASH_C_144
#undef JAX_FLASH_C_160
#undef JAX_FLASH_C_176
#undef JAX_FLASH_C_192
#undef JAX_FLASH_C_208
#undef JAX_FLASH_C_224
#undef JAX_FLASH_C_240
#undef JAX_FLASH_C_256
#undef JAX_FLASH_TEXT_16
#undef JAX_FLASH_TEXT_32
#undef JAX_FLASH_TEXT_48
#undef JAX_FLASH_TEXT_64
#undef JAX_FLASH_TEXT_80
#undef JAX_FLASH_TEXT_96
#undef JAX_FLASH_TEXT_112
#undef JAX_FLASH_TEXT_128
#undef JAX_FLASH_TEXT_144
#undef JAX_FLASH_TEXT_160
#undef JAX_FLASH_TEXT_176
#undef JAX_FLASH_TEXT_192
#undef JAX_FLASH_TEXT_208
#undef JAX_FLASH_TEXT_224
#undef JAX_FLASH_TEXT_240
#undef JAX_FLASH_TEXT_256

}  // namespace jax_flash
