// What a kernel that runs on the host asks of the emulator, in place of instructions. See emulator.cc.
#pragma once

extern "C" char memory[];  // the block's shared memory, by the name that the kernels give it

namespace emulator {

// Where in the sources something stands.
struct Site {
  const char* function;
  const char* file;
  unsigned line;
};
#define EMULATOR_SITE ::emulator::Site site = {__builtin_FUNCTION(), __builtin_FILE(), __builtin_LINE()}

unsigned thread();  // in its block
unsigned block();
unsigned blocks();
unsigned threads();
unsigned address_of(const void* shared);
[[noreturn]] void fail(const char* what, const Site& site);

// Deposits `size` bytes, at most 64, and returns what all 32 lanes of the warp have deposited, 64 bytes apart.
const char* exchange(const void* mine, unsigned size, const Site& site);
// Of the hardware's 16, `count` threads; those that only arrive go on.
void named_barrier(unsigned barrier, unsigned count, bool waits, const Site& site);

// The bytes of shared memory at an address, which has to be a multiple of `width`; and notes that this thread has
// written there, which wgmma and TMA see after a fence.
char* shared(unsigned address, unsigned width, const Site& site);
void written(unsigned address, unsigned bytes);
void proxy_fence(const Site& site);

void barrier_init(unsigned barrier, unsigned arrivals, const Site& site);
void barrier_arrive(unsigned barrier, unsigned count, const Site& site);
void barrier_expect(unsigned barrier, unsigned bytes, const Site& site);
void barrier_wait(unsigned barrier, unsigned parity, const Site& site);

void copy_box(unsigned to, const void* map, unsigned barrier, int column, int row, int head, int batch,
              const Site& site);
void add_bulk(float* to, unsigned from, unsigned bytes, const Site& site);
void store_bulk(void* to, unsigned from, unsigned bytes, const Site& site);
void store_box(const void* map, unsigned from, int column, int row, int head, int batch, const Site& site);
void bulk_commit();
void bulk_wait_read(unsigned pending, const Site& site);
void bulk_wait(unsigned pending, const Site& site);

// cp.async: `bytes` into shared memory, or zeros where `from` is null; there once the thread has waited for its group,
// or at a barrier at which it arrives behind them. wgmma sees them after a fence of a thread that has waited there.
void copy_chunk(unsigned to, const void* from, unsigned bytes, const Site& site);
void chunks_commit();
void chunks_wait(unsigned pending, const Site& site);
void barrier_arrive_behind_chunks(unsigned barrier, const Site& site);

// A product of a warpgroup as one of its threads sees it.
struct Product {
  unsigned columns;  // of B
  bool bf16;
  bool a_in_registers, a_by_columns, b_by_columns;
  bool accumulate;
  unsigned long long a, b;  // descriptors
  unsigned a_registers[4];
  float* accumulators;  // columns / 2 of them
};
void product(const Product& product, const Site& site);
void products_fence(const Site& site);
void products_commit();
void products_wait(unsigned pending, const Site& site);

void registers(unsigned count, bool more, const Site& site);

float half_to_float(unsigned short x);
unsigned short float_to_half(float x);
unsigned short float_to_bf16(float x);

}  // namespace emulator
