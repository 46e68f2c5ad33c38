// What one instruction set offers to the dispatcher: the kernels of isa.cc, compiled once per set with its own flags.
//
// An item is the unit of work that one thread does alone; the plan says how many there are. Results are bit for bit the
// same for any number of threads: plans depend on the shape alone, except for the rows of a forward block and the keys
// of a backward one, which change no result.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../problem.h"

namespace jax_flash::cpu {

struct ForwardPlan {
  int fold;        // query heads of one key head whose rows share a block: the group for short queries, else 1
  int block_rows;  // rows of a block, a multiple of 16; if together all rows of a head, rounded up to a power of two
  int blocks;      // blocks of a folded head; if packed an upper bound for any lengths of the sequences
  int splits;      // into how many ranges the keys are split, whose partial softmax states forward_combine merges
  bool together;   // decoding: an item serves all heads of a batch entry, and reads their keys in the order of memory
  int64_t blocks_in_all;  // batch * q_heads / fold * blocks
  int64_t items;          // blocks_in_all * splits; batch * splits if together
  int64_t key_bytes;      // of K and V
};

// Blocks of at most so many rows are decoding: head_dim is in the lanes (decoding.h).
constexpr int kDecodingRows = 8;

// The scratch holds double [items][elements of dcaptured], the items' sums of the gradients of captured arrays; from
// `dq` on sums of dq [chunks][batch][q_heads][padded_q_length][padded_head_dim]; and what follows them.
struct BackwardPlan {
  int chunks;               // groups of key blocks, each with its own sum of dq
  bool in_turn;             // a block of keys is an item, and all of a head add to one sum of dq in their order
  int keys;                 // of a block: kBackwardKeys, or up to kMostBackwardKeys if in_turn
  int blocks;               // of a head, if in_turn
  int batch_items;          // batch; 1 if its entries share dbias, and so are one item
  int head_items;           // kv_heads or 1, likewise
  int chunk_items;          // chunks or 1, likewise
  int64_t items;            // batch_items * head_items * chunk_items; batch * kv_heads * blocks if in_turn
  int64_t padded_q_length;  // rows of a head in a sum of dq, with a padding for each sequence
  int64_t padded_head_dim;  // elements of such a row
  int64_t dq;               // offset in the scratch
  int64_t delta;            // offset in the scratch: [batch][q_heads][q_length] rowsum(dout * out) - dlse
  int64_t row_lse;          // likewise: lse in units of log2, or of restated rows the maximum
  int64_t row_rest;         // likewise: lse - row_lse of restated rows, and 0 of others
  bool copies;              // backward_prepare copies q and dout too, head by head, for every block of keys to read
  int64_t q_copy;           // offset in the scratch: [batch][q_heads][q_length][a row]; or records of both
  int64_t dout_copy;        // likewise: [batch][q_heads][q_length][a row]
  int64_t record;           // elements of a copy of kReduceRows rows of q and dout as pairs, or 0
  int prepared_rows;        // of all heads, an item of backward_prepare
  int64_t prepare_items;    // batch * parts of prepared_rows rows
  int64_t touched;  // offset in the scratch: [chunks][batch][kv_heads][row_blocks], 1 if the chunk has sums of the rows
  int64_t dslopes;  // likewise: [chunks][batch][q_heads][sequences]; only with the gradient of the slopes
  int64_t slope_sums;    // likewise: [chunks][batch][q_heads][q_length][2]
  int64_t scratch;       // elements in all
  int row_blocks;        // blocks of a head in backward_reduce; if packed an upper bound, as above
  int64_t reduce_items;  // batch * q_heads * row_blocks; 0 if the blocks of keys write dq themselves
};

constexpr int kReduceRows = 64;
constexpr int kBackwardKeys = 96, kMostBackwardKeys = 192;  // of a block
constexpr int kPairedRows = 32;  // in the backward of pairs queries and keys of a tile are padded to this multiple
constexpr int kMaxChunks = 8;

// How far each block of keys has come with its additions to dq: it and all blocks before it have passed so many tiles
// of the rows of its key head's group.
constexpr int kAllTiles = 2147483647;  // of a block that is done
class Turns {
 public:
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
  // Bytes of a split's partial softmax state, per item; only for splits > 1.
  size_t (*forward_partial)(DType, const Problem&, const ForwardPlan&);

  // Writes out and lse, or a partial softmax state if the keys are split.
  void (*forward)(DType, const Problem&, const ForwardPlan&, int64_t item, void* workspace, void* partials);
  // Writes out and lse from the partial softmax states of the `splits` items of a block.
  void (*forward_combine)(DType, const Problem&, const ForwardPlan&, int64_t item, void* workspace,
                          const void* partials);
  // Writes delta, lse in units of log2, and the copies of q and dout into the scratch.
  void (*backward_prepare)(DType, const Problem&, const BackwardPlan&, int64_t item, void* workspace);
  // Writes dk and dv, adds to dbias, and leaves sums of dq and of the slopes' gradients in Problem::scratch; without
  // reduce_items it writes dq itself. The turns are null unless the plan is in_turn.
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
