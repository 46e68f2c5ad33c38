// What one instruction set offers to the dispatcher: the kernels of isa.cc, compiled once per set with its own flags.
//
// An item is the unit of work that one thread does alone; the plan says how many there are. Results are the same bit
// for bit whatever the number of threads: plans depend on the shape only, but for the rows of a forward block and the
// keys of a backward one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../problem.h"

namespace jax_flash::cpu {

struct ForwardPlan {
  int fold;        // query heads of one key head whose rows stand in one block: the group for short queries, else 1
  int block_rows;  // rows of a block, a multiple of 16; all rows of a head, up to a power of two, when together
  int blocks;      // blocks of a folded head; when packed a bound, which fits any lengths of the sequences
  int splits;      // parts of the keys that are attended to apart, their results combined by forward_combine
  bool together;   // an item serves all heads of a batch entry: few rows, whose keys are read once, in memory's order
  int64_t blocks_in_all;  // batch * q_heads / fold * blocks
  int64_t items;          // blocks_in_all * splits; batch * splits when together
  int64_t key_bytes;      // of K and V
};

// Rows of a block that put head_dim in the lanes (decoding.h).
constexpr int kDecodingRows = 8;

// The scratch holds sums of dq [chunks][batch][q_heads][padded_q_length][padded_head_dim], and what follows them.
struct BackwardPlan {
  int chunks;               // parts of the key blocks, each with its own sum of dq
  bool in_turn;             // a block of keys is an item, and all of a head add to one sum of dq in their order
  int keys;                 // of a block: kBackwardKeys, or as many as kMostBackwardKeys when in turn
  int blocks;               // of a head, when in turn
  int batch_items;          // batch; 1 when its entries share dbias, and so are one item
  int head_items;           // kv_heads or 1, likewise
  int chunk_items;          // chunks or 1, likewise
  int64_t items;            // batch_items * head_items * chunk_items; batch * kv_heads * blocks when in turn
  int64_t padded_q_length;  // rows of a head in a sum of dq, with a padding for each sequence
  int64_t padded_head_dim;  // elements of such a row
  int64_t delta;            // where in the scratch: [batch][q_heads][q_length] rowsum(dout * out) - dlse
  int64_t row_lse;          // likewise: lse in units of log2
  bool copies;              // q and dout are copied then too, head by head: every block of keys reads them
  int64_t q_copy;           // where in the scratch: [batch][q_heads][q_length][a row]; or records of both
  int64_t dout_copy;        // likewise: [batch][q_heads][q_length][a row]
  int64_t record;           // elements of a copy of kReduceRows rows of q and dout as pairs, or 0
  int prepared_rows;        // of all heads, an item of backward_prepare
  int64_t prepare_items;    // batch * parts of prepared_rows rows
  int64_t touched;          // where in the scratch it says which sums are there: [chunks][batch][kv_heads][row_blocks]
  int64_t dslopes;          // and [chunks][batch][q_heads][sequences]; only with the gradient of the slopes
  int64_t slope_sums;       // likewise: [chunks][batch][q_heads][q_length][2]
  int64_t scratch;          // elements in all
  int row_blocks;           // blocks of a head in backward_reduce; when packed a bound, as above
  int64_t reduce_items;     // batch * q_heads * row_blocks; 0 where the blocks of keys write dq themselves
};

constexpr int kReduceRows = 64;
constexpr int kBackwardKeys = 96, kMostBackwardKeys = 192;  // of a block
constexpr int kPairedRows = 32;  // in the backward of pairs queries and keys of a tile are padded to this multiple
constexpr int kMaxChunks = 8;

// How far each block of keys is with its additions to dq: it and all before it have passed so many tiles of the rows of
// its key head's group.
class Turns {
 public:
  static constexpr int kAll = 2147483647;

  Turns(std::atomic<int>* passed, const std::atomic<bool>& failed) : passed_(passed), failed_(failed) {}
  // Returns when `block` has passed more than `tile` tiles, or when its thread has failed.
  void wait(int64_t block, int tile) const;
  void pass(int64_t block, int tiles) const { passed_[block].store(tiles, std::memory_order_release); }

 private:
  std::atomic<int>* passed_;  // [batch][kv_heads][blocks]
  const std::atomic<bool>& failed_;
};

struct Kernels {
  const char* name;
  // Bytes of the buffer, aligned to 64 bytes, that a thread lends to an item.
  size_t (*forward_workspace)(DType, const Problem&, const ForwardPlan&);
  size_t (*backward_workspace)(DType, const Problem&, const BackwardPlan&);
  // BackwardPlan::record of these kernels: 0 where they copy rows as they are.
  int64_t (*backward_record)(DType, const Problem&);
  // Bytes of a split's result, per item; only for splits > 1.
  size_t (*forward_partial)(DType, const Problem&, const ForwardPlan&);

  // Writes out and lse, or one partial result when the keys are split.
  void (*forward)(DType, const Problem&, const ForwardPlan&, int64_t item, void* workspace, void* partials);
  // Writes out and lse from the partial results; splits items make one of these.
  void (*forward_combine)(DType, const Problem&, const ForwardPlan&, int64_t item, void* workspace,
                          const void* partials);
  // Makes delta, lse in units of log2, and the copies of q and dout.
  void (*backward_prepare)(DType, const Problem&, const BackwardPlan&, int64_t item, void* workspace);
  // Writes dk and dv, adds to dbias, and leaves sums of dq and of the slopes' gradients in Problem::scratch; dq itself
  // where there are no reduce_items. The turns are null where the plan has none.
  void (*backward)(DType, const Problem&, const BackwardPlan&, int64_t item, void* workspace, const Turns*);
  // Adds up the sums of the chunks; writes dq and dalibi_slopes.
  void (*backward_reduce)(DType, const Problem&, const BackwardPlan&, int64_t item, void* workspace);
};

namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {  // serves DType::bf16 alone
extern const Kernels kKernels;
}
namespace amx_bf16 {  // likewise
extern const Kernels kKernels;
}
namespace neon {
extern const Kernels kKernels;
}

}  // namespace jax_flash::cpu
