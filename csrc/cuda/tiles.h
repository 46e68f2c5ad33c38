// THE table: which tile row a kernel is compiled with, by family, pass, head_dim and available shared memory.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>

#include "problem.h"
#include "scaling.h"

namespace jax_flash::cuda {

// The fields of a tile row, printed by name as constants into the kernel's source.
#define JAX_FLASH_TILE_FIELDS(FIELD)                                     \
  FIELD(block_q)    /* rows of query a block holds at a time */          \
  FIELD(block_kv)   /* keys a block holds at a time */                   \
  FIELD(warps)      /* per block */                                      \
  FIELD(stages)     /* buffers of what the loop walks over */            \
  FIELD(min_blocks) /* per multiprocessor, for the register allocator */ \
  FIELD(key_tiles)  /* backward: of 16 keys, in a warp's part of the scores */

struct TileRow {
#define JAX_FLASH_TILE_FIELD(name) int name = 1;
  JAX_FLASH_TILE_FIELDS(JAX_FLASH_TILE_FIELD)
#undef JAX_FLASH_TILE_FIELD
};

// Which calls a rule serves: every call; those without functions and intervals, which take registers for every pair;
// light ones, whose options take few: a window, dropout, slopes without a gradient; or plain ones alone, see
// is_plain().
enum class Calls { all, without_functions, light, plain };

struct TileRule {
  const char* family;
  int limbs;  // of the arrays, which decide what a tile costs
  Pass pass;
  int max_head_dim;  // serves head dims up to this
  int shared_kb;     // needs so much dynamic shared memory a block
  TileRow row;
  Calls calls = Calls::all;
};

namespace rules {

constexpr Pass forward = Pass::forward, backward = Pass::backward, backward_dq = Pass::backward_dq,
               backward_bias = Pass::backward_bias, forward_split_kv = Pass::forward_split_kv,
               forward_single_tile = Pass::forward_single_tile, scale = Pass::scale;
constexpr Calls plain = Calls::plain, light = Calls::light, without_functions = Calls::without_functions;

// The first rule that fits is taken. The comment of each has the forward or backward rate that put it there: TFLOP/s on
// an H200 without mask, B4 S4096, N * H = 2048, bfloat16 for one limb. Rates after "first:" are those of the first
// working version. Rules for GPUs with less shared memory were timed on an H200 too.
inline constexpr TileRule all[] = {
    // family, limbs, pass, head_dim, shared KB, {block_q, block_kv, warps, stages, min_blocks, key_tiles}
    {"sm90a", 1, forward, 64, 89, {192, 128, 16, 2, 1}, plain},  // 557; with other options it spills; 192x96 523
    {"sm90a", 1, forward, 64, 81, {128, 128, 12, 2, 1}},         // 485, 128x192 478
    {"sm90a", 1, forward, 128, 161, {128, 128, 12, 2, 1}},       // 714; 128x160 711, 128x176 699, 192x80 689
    {"sm90a", 1, forward, 192, 217, {128, 112, 12, 2, 1}},
    {"sm90a", 1, forward, 256, 225, {128, 80, 12, 2, 1}},          // 763; 128x64 761, 128x48 708
    {"sm90a", 1, backward, 64, 198, {128, 128, 12, 2, 1}, light},  // 548; 64x256 517
    {"sm90a", 1, backward, 64, 99, {64, 128, 12, 2, 1}},           // with options, which take registers
    {"sm90a", 1, backward, 128, 164, {64, 128, 12, 2, 1}},         // 611; first: 532, with three stages 3% less
    {"sm90a", 1, backward, 128, 227, {80, 128, 12, 2, 1}, plain},  // of long calls: 662 at S 16384, 64x128 639
    {"sm90a", 1, backward, 256, 211, {64, 64, 12, 2, 1}},          // 641 without dQ; with it 423, with one stage 340
    // The separate pass for dQ, which has three products.
    {"sm90a", 1, backward_dq, 64, 97, {128, 128, 12, 2, 1}},    // 667; 192x64 620, 128x64 548
    {"sm90a", 1, backward_dq, 128, 193, {128, 128, 12, 2, 1}},  // 794; 128x96 733, 128x64 718
    {"sm90a", 1, backward_dq, 256, 225, {128, 64, 12, 2, 1}},   // 786; 128x32 with three stages 643
    {"sm80", 1, forward, 64, 40, {128, 96, 4, 1, 2}, plain},    // 371; 128x112 372, but 317 for 328 at S 1024
    {"sm80", 1, forward, 64, 32, {128, 64, 4, 1, 2}},           // 353; first: 287, 64x64 253, 128x128 with 8 warps 249
    {"sm80", 1, forward, 128, 128, {128, 64, 4, 1, 2}},         // 436; 128x48 416; two blocks fit
    {"sm80", 1, forward, 128, 48, {128, 32, 4, 1, 2}},          // 376; first: 312, 128x128 with 8 warps 295, 128x64 276
    {"sm80", 1, forward, 256, 194, {64, 64, 4, 1, 2}},          // 366; 64x80 361, 64x32 366; two blocks fit
    {"sm80", 1, forward, 256, 128, {128, 64, 8, 1, 1}},         // 366; first: 287
    {"sm80", 1, forward, 256, 96, {128, 32, 8, 1, 1}},          // first: 267, 64x64 with 4 warps 222
    // The split-KV forward has a rule for each block_q of kSplitKvRows. Its warps form teams, each of which has all
    // block_q rows and a share of the keys.
    {"sm80", 1, forward_split_kv, 64, 67, {16, 64, 4, 1, 2}},
    {"sm80", 1, forward_split_kv, 128, 69, {16, 32, 4, 1, 3}, without_functions},
    {"sm80", 1, forward_split_kv, 128, 69, {16, 32, 4, 1, 2}},  // three blocks spill; not timed
    {"sm80", 1, forward_split_kv, 256, 137, {16, 32, 4, 1, 1}},
    {"sm80", 1, forward_split_kv, 256, 75, {16, 16, 4, 1, 1}},
    {"sm80", 1, forward_split_kv, 64, 46, {64, 64, 8, 1, 1}},
    {"sm80", 1, forward_split_kv, 128, 86, {64, 64, 8, 1, 1}},
    {"sm80", 1, forward_split_kv, 256, 166, {64, 32, 8, 1, 1}},
    {"sm80", 1, forward_split_kv, 256, 99, {64, 32, 4, 1, 1}},
    // A warp of the single-tile forward has 16 keys and 16 columns of values. For 128 keys and columns eight warps took
    // 3.9 us a call in a chain, forward_split_kv 3.5.
    {"sm80", 1, forward_single_tile, 64, 3, {16, 16, 4, 1, 1}},
    // Rows of two tiles of keys a warp spill with most options, 128 rows with functions and intervals (600 to 2,500
    // bytes).
    {"sm80", 1, backward, 64, 117, {64, 64, 4, 2, 2, 2}, plain},  // 321, with one tile of keys 274; two blocks fit
    {"sm80", 1, backward, 64, 130, {128, 128, 8, 2, 1}, without_functions},  // 264; first: 264, 64x64 with 4 warps 245
    {"sm80", 1, backward, 64, 82, {64, 128, 8, 2, 1, 2}, plain},             // 285, with one 253
    {"sm80", 1, backward, 64, 82, {64, 128, 8, 2, 1}},                       // first: 242
    {"sm80", 1, backward, 128, 227, {64, 64, 4, 2, 2, 2}, plain},            // 321; two blocks take all of 228 KB
    {"sm80", 1, backward, 128, 161, {64, 128, 8, 2, 1, 2}, plain},           // 315
    {"sm80", 1, backward, 128, 146, {64, 128, 8, 2, 1}},           // 286, with one stage 277; first: 270 and 279
    {"sm80", 1, backward, 128, 73, {64, 64, 4, 1, 1}},             // first: 256
    {"sm80", 1, backward, 256, 209, {64, 64, 8, 2, 1, 2}, plain},  // 263, separate dQ 225
    {"sm80", 1, backward, 256, 145, {64, 64, 8, 1, 1, 2}, plain},  // 264, separate dQ 204: dQ's product hides loads
    {"sm80", 1, backward, 256, 145, {64, 64, 8, 1, 1}},            // 220; first: 207, two stages 205, 32x64 187
    {"sm80", 1, backward, 256, 70, {32, 32, 4, 1, 1}},             // first: 176
    {"sm80", 1, backward_dq, 64, 50, {128, 48, 4, 2, 2}, plain},   // 409; 128x64 with two tiles of K 415, but it spills
    {"sm80", 1, backward_dq, 64, 64, {128, 64, 4, 1, 2}},          // 390; 128x32 330, 128x128 with 8 warps 320
    {"sm80", 1, backward_dq, 128, 80, {128, 32, 4, 1, 2}},         // 411; 64x64 344, 128x64 with 8 warps 320
    {"sm80", 1, backward_dq, 256, 192, {128, 64, 8, 1, 1}, plain},  // 344; with two tiles of K 353, but it spills
    {"sm80", 1, backward_dq, 256, 112, {64, 48, 4, 1, 1}, plain},   // 336
    {"sm80", 1, backward_dq, 256, 96, {64, 32, 4, 1, 1}},           // 312; 64x64 307, 128x32 with 8 warps 287
    {"sm80", 2, backward_dq, 64, 96, {64, 64, 4, 1, 1}},
    {"sm80", 2, forward, 64, 48, {64, 64, 4, 1, 2}},
    {"sm80", 2, forward, 128, 96, {128, 32, 8, 1, 1}},
    {"sm80", 2, forward, 256, 160, {128, 16, 8, 1, 1}},
    {"sm80", 2, forward, 256, 96, {64, 16, 4, 1, 1}},
    {"sm80", 2, backward, 64, 96, {64, 64, 8, 1, 1}},
    {"sm80", 2, backward, 128, 128, {32, 64, 8, 1, 1}},
    {"sm80", 2, backward, 128, 80, {32, 32, 4, 1, 2}},
    {"sm80", 2, backward, 256, 144, {32, 32, 4, 1, 1}},
    {"sm80", 2, backward_dq, 64, 64, {64, 64, 4, 1, 1}},
    {"sm80", 2, backward_dq, 128, 96, {64, 16, 4, 1, 1}},
    {"sm80", 2, backward_dq, 256, 96, {32, 16, 2, 1, 1}},
    {"sm75", 2, forward, 64, 64, {64, 32, 4, 1, 1}},
    {"sm75", 2, forward, 128, 64, {64, 32, 4, 1, 1}},
    {"sm75", 2, backward, 64, 64, {32, 64, 4, 1, 1}},
    {"sm75", 2, backward, 128, 64, {16, 32, 2, 1, 1}},
    {"sm75", 2, backward_dq, 64, 64, {64, 32, 4, 1, 1}},
    {"sm75", 2, backward_dq, 128, 64, {32, 16, 2, 1, 1}},
    {"sm70", 2, forward, 64, 96, {64, 32, 4, 1, 1}},
    {"sm70", 2, forward, 128, 96, {64, 32, 4, 1, 1}},
    {"sm70", 2, backward, 64, 96, {32, 64, 4, 1, 1}},
    {"sm70", 2, backward, 128, 96, {32, 32, 4, 1, 1}},
    {"sm70", 2, backward_dq, 64, 96, {64, 32, 4, 1, 1}},
    {"sm70", 2, backward_dq, 128, 96, {32, 16, 2, 1, 1}},
    // Volta, 96 KB: 32 rows a warp if two blocks of four warps fit into the registers, which halves the reads of K and
    // V, else eight warps of 16 rows. The comments have the registers that NVRTC 12.9 uses.
    {"sm70", 1, forward, 64, 32, {128, 64, 4, 1, 2}, plain},   // two blocks, 233; with an option more it spills
    {"sm70", 1, forward, 64, 32, {128, 64, 8, 1, 1}},          // 170
    {"sm70", 1, forward, 128, 48, {128, 32, 4, 1, 2}, plain},  // two blocks, 254; of 64 keys it spills
    {"sm70", 1, forward, 128, 64, {128, 64, 8, 1, 1}},         // 222
    {"sm70", 1, forward, 192, 96, {128, 64, 8, 1, 1}},         // 225
    {"sm70", 1, forward, 256, 96, {128, 32, 8, 1, 1}, plain},  // 227
    {"sm70", 1, forward, 256, 80, {128, 16, 8, 1, 1}},         // 248
    {"sm70", 1, forward_split_kv, 64, 35, {16, 32, 4, 1, 1}},
    {"sm70", 1, forward_split_kv, 128, 39, {16, 16, 4, 1, 1}},
    {"sm70", 1, forward_split_kv, 64, 46, {64, 32, 8, 1, 1}},
    {"sm70", 1, forward_split_kv, 128, 86, {64, 32, 8, 1, 1}},
    {"sm70", 1, backward, 64, 33, {64, 64, 4, 1, 2}, plain},    // two blocks, 247
    {"sm70", 1, backward, 64, 25, {32, 64, 4, 1, 2}},           // two blocks, 250
    {"sm70", 1, backward, 96, 73, {64, 128, 8, 1, 1}},          // 248; 32x64 in two blocks reads 1/8 more
    {"sm70", 1, backward, 128, 81, {32, 128, 8, 1, 1}, plain},  // 254
    {"sm70", 1, backward, 128, 59, {32, 64, 8, 1, 1}},          // 252
    {"sm70", 1, backward, 192, 81, {32, 64, 8, 1, 1}},          // 245
    {"sm70", 1, backward, 256, 69, {32, 32, 4, 1, 1}},          // 250; 64 keys do not fit
    {"sm70", 1, backward_dq, 64, 40, {128, 32, 4, 1, 2}},       // two blocks, 232
    {"sm70", 1, backward_dq, 96, 72, {128, 64, 8, 1, 1}},       // 203
    {"sm70", 1, backward_dq, 128, 80, {128, 32, 8, 1, 1}},      // 198
    {"sm70", 1, backward_dq, 192, 96, {96, 32, 6, 1, 1}},       // 229
    {"sm70", 1, backward_dq, 256, 96, {64, 32, 4, 1, 1}},       // 252
    // Turing, 64 KB: eight warps wherever they fit.
    {"sm75", 1, forward, 64, 32, {128, 64, 4, 1, 2}, plain},  // two blocks, 233; with an option more it spills
    {"sm75", 1, forward, 64, 32, {128, 64, 8, 1, 1}},         // 162
    {"sm75", 1, forward, 128, 64, {128, 64, 8, 1, 1}},        // 206
    {"sm75", 1, forward, 160, 63, {128, 32, 8, 1, 1}},        // 210
    {"sm75", 1, forward, 192, 60, {128, 16, 8, 1, 1}},        // 202; 96x32 with 6 warps 234
    {"sm75", 1, forward, 256, 64, {96, 16, 6, 1, 1}, plain},  // 254; 64x32 with 4 warps spills
    {"sm75", 1, forward, 256, 48, {64, 16, 4, 1, 1}},         // 254
    {"sm75", 1, forward_split_kv, 64, 35, {16, 32, 4, 1, 1}},
    {"sm75", 1, forward_split_kv, 128, 39, {16, 16, 4, 1, 1}},
    {"sm75", 1, forward_split_kv, 64, 46, {64, 32, 8, 1, 1}},
    {"sm75", 1, forward_split_kv, 128, 51, {64, 32, 4, 1, 1}},
    {"sm75", 1, backward, 64, 25, {32, 64, 4, 1, 2}},      // two blocks, 198; of 64 rows it spills
    {"sm75", 1, backward, 96, 60, {32, 96, 6, 1, 1}},      // 254
    {"sm75", 1, backward, 128, 59, {32, 64, 8, 1, 1}},     // 203; 4 warps spill
    {"sm75", 1, backward, 192, 54, {32, 32, 4, 1, 1}},     // 252
    {"sm75", 1, backward, 256, 52, {16, 32, 4, 1, 1}},     // 229
    {"sm75", 1, backward_dq, 64, 32, {64, 64, 4, 1, 2}},   // two blocks, 179
    {"sm75", 1, backward_dq, 128, 64, {64, 64, 4, 1, 1}},  // 229; on an H200, a block a time, 235 TFLOP/s, 96x32 200
    {"sm75", 1, backward_dq, 160, 63, {64, 32, 4, 1, 1}},  // 229
    {"sm75", 1, backward_dq, 192, 60, {64, 16, 4, 1, 1}},  // 251
    {"sm75", 1, backward_dq, 256, 64, {48, 16, 3, 1, 1}},  // 247
    // The pass for a bias that batch entries or heads share, which Hopper uses too: rows without spills, not timed.
    {"sm80", 1, backward_bias, 64, 48, {128, 64, 8, 2, 1}},
    {"sm80", 1, backward_bias, 128, 96, {128, 64, 8, 2, 1}},
    {"sm80", 1, backward_bias, 128, 64, {64, 64, 4, 2, 1}},
    {"sm80", 1, backward_bias, 256, 192, {128, 64, 8, 2, 1}},
    {"sm80", 1, backward_bias, 256, 128, {64, 64, 4, 2, 1}},
    {"sm80", 1, backward_bias, 256, 64, {64, 64, 4, 1, 1}},
    {"sm80", 2, backward_bias, 128, 64, {64, 64, 4, 1, 1}},
    {"sm80", 2, backward_bias, 256, 64, {32, 32, 2, 1, 1}},
    {"sm75", 1, backward_bias, 128, 32, {64, 64, 4, 1, 2}},
    {"sm75", 1, backward_bias, 256, 64, {64, 64, 4, 1, 1}},
    {"sm75", 2, backward_bias, 128, 64, {64, 32, 4, 1, 1}},
    {"sm70", 1, backward_bias, 128, 32, {64, 64, 4, 1, 2}},
    {"sm70", 1, backward_bias, 256, 48, {64, 32, 4, 1, 2}},
    {"sm70", 2, backward_bias, 128, 48, {64, 32, 4, 1, 2}},
    // These kernels have no tiles, and take all head dims.
    {"sm80", 1, scale, kScaledColumns, 0, {}},
    {"sm80", 2, scale, kScaledColumns, 0, {}},
    {"sm75", 1, scale, kScaledColumns, 0, {}},
    {"sm75", 2, scale, kScaledColumns, 0, {}},
    {"sm70", 1, scale, kScaledColumns, 0, {}},
    {"sm70", 2, scale, kScaledColumns, 0, {}},
};

}  // namespace rules

// The dynamic shared memory that a block may have, in KB, by compute capability.
inline int shared_kb_of(int arch) {
  switch (arch) {
    case 70:
    case 72: return 96;
    case 75: return 64;
    case 80:
    case 87: return 163;
    case 86:
    case 89:
    case 120:
    case 121: return 99;
    default: return 227;  // 9.0, 10.x, 11.x
  }
}

// Whether a call has the main loop of one without options: at most a scale and `causal` between product and softmax.
inline bool is_plain(const Options& options) {
  bool plain = true;
#define JAX_FLASH_NOTHING(...)
#define JAX_FLASH_FEATURE(type, name, absent) plain &= options.name == absent;
#define JAX_FLASH_OPERAND(type, name, dims) plain &= !options.has_##name;
  JAX_FLASH_FIELDS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_FEATURE, JAX_FLASH_OPERAND, JAX_FLASH_NOTHING,
                   JAX_FLASH_OPERAND)
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_NOTHING
  return plain && !options.functions;
}

// Whether a call has no option but scale and causal.
inline bool only_causal(const Options& options) {
  bool absent = true;
#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_FEATURE(type, name, value) absent &= options.name == value;
#define JAX_FLASH_OPERAND(type, name, dims) absent &= !options.has_##name;
  JAX_FLASH_OPTIONS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_FEATURE, JAX_FLASH_OPERAND, JAX_FLASH_OPERAND)
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_NOTHING
  return absent && !options.functions;
}

// Whether a window bounds the keys of a row to the left.
inline bool bounded_left(const Options& o) { return o.window_left != Options{}.window_left || o.has_window_bounds; }

// Whether tiles in the middle of a range may have no pair: device/tile_walk.cuh.
inline bool skips_tiles(const Options& o) {
  return o.has_q_segment_ids || o.has_kv_intervals || o.has_q_intervals || o.has_mask_blocks;
}

// The narrowest kind of calls that one belongs to.
inline Calls calls_of(const Options& options) {
  if (is_plain(options)) return Calls::plain;
  Options others = options;
  others.window_left = others.window_right = std::numeric_limits<int>::max();
  others.has_window_bounds = others.has_dropout_seeds = false;
  others.dropout_rate = 0;
  others.has_alibi_slopes = options.has_dalibi_slopes;
  if (is_plain(others)) return Calls::light;
  const bool of_pairs = options.functions || options.has_kv_intervals || options.has_q_intervals;
  return of_pairs ? Calls::all : Calls::without_functions;
}

// nullptr if no row serves. `rows` is the wanted block_q; 0: any.
inline const TileRow* find_tile_row(const std::string& family, int limbs, Pass pass, int head_dim, int arch,
                                    Calls calls = Calls::all, int rows = 0) {
  for (const TileRule& rule : rules::all) {
    if (family == rule.family && limbs == rule.limbs && pass == rule.pass && head_dim <= rule.max_head_dim &&
        rule.shared_kb <= shared_kb_of(arch) && rule.calls <= calls && (!rows || rows == rule.row.block_q)) {
      return &rule.row;
    }
  }
  return nullptr;
}

inline const TileRow& tile_row(const std::string& family, int limbs, Pass pass, int head_dim, int arch,
                               Calls calls = Calls::all, int rows = 0) {
  if (const TileRow* row = find_tile_row(family, limbs, pass, head_dim, arch, calls, rows)) return *row;
  throw std::invalid_argument("no tile row for family " + family + ", head_dim " + std::to_string(head_dim) +
                              ", compute capability " + std::to_string(arch) + (limbs == 2 ? ", of two limbs" : ""));
}

}  // namespace jax_flash::cuda
