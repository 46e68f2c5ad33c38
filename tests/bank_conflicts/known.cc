// Accesses with known costs, one in each function, to test the counting.
#include "record.h"

namespace {

using record::access;
using record::Instruction;

unsigned lane() { return record::thread() % 32; }

void neighbours() { access(Instruction::load, 4 * lane(), 4, RECORD_SITE); }
// Every second bank, each for two lanes.
void two_apart() { access(Instruction::load, 8 * lane(), 4, RECORD_SITE); }
void one_bank() { access(Instruction::store, 128 * lane(), 4, RECORD_SITE); }
void one_word() { access(Instruction::load, 0, 4, RECORD_SITE); }
// Half a warp at a time: the halves may meet in their banks.
void pairs() { access(Instruction::load, 8 * lane(), 8, RECORD_SITE); }
// A quarter of a warp at a time.
void chunks() { access(Instruction::store, 16 * lane(), 16, RECORD_SITE); }
void chunks_of_rows() { access(Instruction::store, 128 * lane(), 16, RECORD_SITE); }
// Rows of 4 chunks with a chunk of padding: of eight chunks in two rows the last conflicts with the first.
void chunks_of_padded_rows() { access(Instruction::copy_async, 16 * (lane() + lane() / 4), 16, RECORD_SITE); }
void matrices() { access(Instruction::load_matrices, 144 * lane(), 64, RECORD_SITE); }
void matrices_of_rows() { access(Instruction::load_transposed, 128 * lane(), 64, RECORD_SITE); }
// Some lanes leave off the last.
void some_lanes() {
  for (unsigned i = 0; i < (lane() < 8 ? 2 : 1); ++i)
    access(Instruction::load, 4096 * i + 16 * lane(), 16, RECORD_SITE);
}
// Seen by the compiler's own calls alone.
void by_pointer() {
  volatile float* shared = reinterpret_cast<volatile float*>(memory) + 1024;
  shared[2 * lane()] = shared[lane()];
}

void run(int tiles) {
  neighbours();
  one_word();
  record::barrier();
  for (int tile = 0; tile < tiles; ++tile) {
    two_apart();
    one_bank();
    pairs();
    chunks();
    chunks_of_rows();
    chunks_of_padded_rows();
    record::barrier();
  }
  matrices();
  matrices_of_rows();
  some_lanes();
  by_pointer();
}

const record::Region regions[] = {{"tile", 0, 8192}};
const bool added = record::add({"known", 0, 0, 32, regions, 1, run});

}  // namespace
