// The records that a kernel on the host makes of its accesses to shared memory.
#pragma once

extern "C" char memory[];  // the block's shared memory, by the name that the kernels give it

namespace record {

enum class Instruction { load, store, plain_load, plain_store, load_matrices, load_transposed, copy_async };

// The source location of an access, which identifies the instructions of a warp.
struct Site {
  const char* function;
  const char* file;
  unsigned line;
};
#define RECORD_SITE {__builtin_FUNCTION(), __builtin_FILE(), __builtin_LINE()}

// A part of the block's shared memory, by its name in SharedStorage.
struct Region {
  const char* name;
  unsigned first;
  unsigned bytes;
};

struct Kernel {
  const char* name;  // of the variant
  int block_q;
  int block_kv;
  int threads;
  const Region* regions;
  int region_count;
  // Runs this thread of one block, which walks over so many tiles.
  void (*run)(int tiles);
};

extern char global[1 << 21];  // global memory, of which all arrays are the same part

bool add(const Kernel& kernel);  // true
void access(Instruction instruction, unsigned address, unsigned width, const Site& site);
void barrier();
void shuffle();
unsigned address_of(const void* shared);
int thread();

}  // namespace record
