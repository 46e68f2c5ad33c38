// Chooses the instruction set, plans the work, and runs the items on the caller's threads.
#include "cpu.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "choice.h"
#include "functions.h"
#include "isa.h"

namespace jax_flash::cpu {
namespace {

#if defined(JAX_FLASH_HAS_amx_bf16)
// Linux gives AMX's tile registers only to a process that requests them, and refuses if the signal stack of a thread is
// too small to save them.
bool may_use_tiles([[maybe_unused]] const Features& has) {
#if defined(JAX_FLASH_EMULATED_TILES)
  return has.pairs;
#elif defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return has.tiles && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// The instruction sets of this build that the processor and the system let this process use, best first.
std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> all;
  [[maybe_unused]] Features has = these_features();
#if defined(JAX_FLASH_EMULATED_PAIRS)
  has.pairs = true;
#endif
#if defined(JAX_FLASH_HAS_amx_bf16)
  if (may_use_tiles(has)) all.push_back(&amx_bf16::kKernels);
#endif
#if defined(JAX_FLASH_HAS_avx512_bf16)
  if (has.pairs) all.push_back(&avx512_bf16::kKernels);
#endif
#if defined(JAX_FLASH_HAS_avx512)
  if (has.avx512) all.push_back(&avx512::kKernels);
#endif
#if defined(JAX_FLASH_HAS_avx2)
  if (has.avx2) all.push_back(&avx2::kKernels);
#endif
#if defined(JAX_FLASH_HAS_neon)
  all.push_back(&neon::kKernels);
#endif
#if defined(JAX_FLASH_HAS_baseline)
  all.push_back(&baseline::kKernels);
#endif
  return all;
}

// The kernels for bfloat16, and those for the other dtypes.
struct Chosen {
  const Kernels *bf16, *others;
  bool named;  // by the user
};

Chosen choose_kernels() {
  const char* variable = std::getenv("JAX_FLASH_CPU_ISA");
  std::string wanted = variable ? variable : "", names;
  std::vector<const Kernels*> usable = usable_kernels();
  std::vector<std::string_view> sets;
  for (const Kernels* kernels : usable) {
    sets.emplace_back(kernels->name);
    names += (names.empty() ? "" : ", ") + std::string(kernels->name);
  }
  Choice choice = choose(this_processor(), sets, wanted);
  if (choice.others.empty()) {
    throw std::runtime_error("JAX_FLASH_CPU_ISA must name an instruction set that this processor has (" + names +
                             "), got " + wanted);
  }
  auto named = [&](std::string_view name) {
    return *std::find_if(usable.begin(), usable.end(), [&](const Kernels* kernels) { return kernels->name == name; });
  };
  return {named(choice.bf16), named(choice.others), !wanted.empty()};
}

const Chosen& chosen() {
  static const Chosen chosen = choose_kernels();
  return chosen;
}

const Kernels& kernels(DType dtype) { return dtype == DType::bf16 ? *chosen().bf16 : *chosen().others; }

// Memory aligned to a cache line.
struct Free {
  void operator()(char* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Buffer = std::unique_ptr<char[], Free>;
Buffer allocate(size_t bytes) { return Buffer(static_cast<char*>(::operator new[](bytes, std::align_val_t{64}))); }

// A buffer of the calling thread, kept for its next item: at most a megabyte or two, for any lengths.
void* workspace(size_t bytes) {
  thread_local Buffer buffer;
  thread_local size_t size = 0;
  if (size < bytes) {
    size = 0;
    buffer = allocate(bytes);
    size = bytes;
  }
  return buffer.get();
}

// Bytes of an element, and of what it is computed in.
int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }
int64_t computed_size_of(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

// Bytes of K and V.
int64_t key_bytes(DType dtype, const Problem& p) {
  return int64_t{p.batch} * p.kv_length * p.kv_heads * (int64_t{p.head_dim} + p.value_head_dim) * size_of(dtype);
}

// Requests pages of 2 MB. glibc's malloc, which XLA's buffers come from, returns blocks of more than 32 MB to the
// system when they are freed, and in some processes smaller ones too, so that every call faults all pages in anew. Such
// faults of 4 KB took a quarter of forward and backward of (1, 1024, 16, 64), causal, on a virtual machine. The ends of
// a buffer keep small pages, for malloc has written its header there.
void ask_for_large_pages([[maybe_unused]] void* p, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kWorthwhile = 4 << 20, kPage = 2 << 20;
  if (bytes < kWorthwhile) return;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + kPage - 1) / kPage * kPage;
  uintptr_t end = (reinterpret_cast<uintptr_t>(p) + bytes) / kPage * kPage;
  // Only advice: results do not depend on whether it succeeds.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}
void ask_for_large_pages(const Tensor& x, int batch, DType dtype) {
  ask_for_large_pages(x.data, x.batch_stride * batch * size_of(dtype));
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of a core's L2 cache; 512 KB if it has less or the system does not say.
int64_t second_level_cache() {
  constexpr long kLeast = 512 << 10;
#if defined(__linux__) && defined(_SC_LEVEL2_CACHE_SIZE)
  static const long size = std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), kLeast);
  return size;
#else
  return kLeast;
#endif
}

// Enough items that some tens of threads find work and a causal triangle's unequal items even out.
constexpr int64_t kEnoughItems = 32;

// The lengths of packed sequences are in arrays that a plan does not read: it assumes equal lengths.
bool is_packed(const Problem& p) { return p.options.has_cu_q_lengths; }
// Whether segments, intervals or a block mask leave out blocks of rows and keys.
bool skips_blocks(const Problem& p) {
  return p.q_segment_ids || p.kv_intervals || p.q_intervals || p.options.has_mask_blocks;
}
int64_t average_length(const Problem& p, int length) {
  return divide_up(length, is_packed(p) ? p.options.sequences : 1);
}

// The backward by pairs pads rows and keys to 32: with 16 of each it runs at 0.54 times the rate of the one by floats,
// with 32 at 1.2 times (Zen 4, AVX512-BF16).
const Kernels& backward_kernels(DType dtype, const Problem& p) {
  constexpr int kWorthwhile = 32;
  bool worthwhile = std::min(average_length(p, p.q_length), average_length(p, p.kv_length)) >= kWorthwhile;
  return worthwhile || chosen().named ? kernels(dtype) : *chosen().others;
}

// Blocks of a head of `rows` rows; if packed an upper bound, see first_block() in ranges.h.
int64_t block_count(const Problem& p, int64_t rows, int64_t block_rows) {
  return is_packed(p) ? rows / block_rows + p.options.sequences + 1 : divide_up(rows, block_rows);
}

ForwardPlan plan_forward(DType dtype, const Problem& p, int64_t threads) {
  ForwardPlan plan{};
  plan.key_bytes = key_bytes(dtype, p);
  int group = p.q_heads / p.kv_heads;
  // Blocks of 48 rows fill whole panels with every instruction set. Longer ones read K and V less often: 384 rows
  // instead of 192 give 1.02 times the rate with head_dim 128 and 1.04 with 64, 1024 instead of 384 give 1.01 to 1.04
  // from 2048 keys on. With 1024 keys they give 1.00 to 1.03, but causal 0.97 to 1.01. Beyond 192 rows the queries and
  // sums of a block have to stay in L2.
  constexpr int kShort = 48, kLong = 192, kLonger = 384, kLongest = 1024;
  const int longest_keys = p.options.causal ? 2048 : 1024;
  constexpr int64_t kLongerBytes = 384 << 10;
  int64_t rows = average_length(p, p.q_length);
  // Heads are not folded with dropout, whose bits are drawn for rows of one head, nor where keys have an interval, or
  // blocks a kind, for each head.
  bool shares_keys = p.options.dropout_rate == 0 && !(p.q_intervals && p.q_intervals_strides.head != 0) &&
                     !(p.mask_blocks && p.mask_blocks_strides.head != 0);
  plan.fold = rows < kShort && shares_keys ? group : 1;
  rows *= plan.fold;
  int64_t heads = int64_t{p.batch} * (p.q_heads / plan.fold);
  int64_t sequences = heads * (is_packed(p) ? p.options.sequences : 1);
  plan.block_rows = kShort;
  int64_t row = (int64_t{p.head_dim} + p.value_head_dim) * computed_size_of(dtype);
  // The most rows, up to `longest`, for which there are `items` blocks; else kShort.
  auto block_rows = [&](int64_t items, int longest) {
    for (int longer : {kLongest, 768, 512, kLonger, 288, kLong, 96}) {
      int64_t blocks = divide_up(rows, longer), bytes = longer > kLonger ? second_level_cache() : kLongerBytes;
      if (longer > longest || sequences * blocks < items || (longer > kLong && longer * row > bytes)) continue;
      // Blocks of equal length: a short last one would read all keys for a few rows.
      return longer > kLong ? divide_up(divide_up(rows, blocks), 16) * 16 : int64_t{longer};
    }
    return int64_t{kShort};
  };
  auto cut = [&](int64_t size) {
    plan.block_rows = static_cast<int>(std::min(size, divide_up(rows, 16) * 16));
    plan.blocks = static_cast<int>(block_count(p, int64_t{plan.fold} * p.q_length, plan.block_rows));
    plan.blocks_in_all = heads * plan.blocks;
  };
  cut(block_rows(kEnoughItems, kLonger));
  // With few blocks and many keys, as in decoding, the keys are split into at least 512 each.
  plan.splits = static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>(kEnoughItems / plan.blocks_in_all, average_length(p, p.kv_length) / 512)));
  // Fewer threads need fewer items. The number of threads may decide the block only where a row's result does not
  // depend on its block: all blocks begin with key 0, see all keys, and have more than kDecodingRows rows.
  constexpr int64_t kItemsOfThread = 8;
  bool same_rows = plan.splits == 1 && plan.fold == 1 && !is_packed(p) && !p.q_lengths && !skips_blocks(p) &&
                   p.options.window_left == 2147483647 && !p.options.has_window_bounds;
  if (same_rows && rows > kLong) {
    auto rest = [&](int64_t size) { return rows - (divide_up(rows, size) - 1) * size; };
    int64_t longer = block_rows(std::min(kEnoughItems, kItemsOfThread * threads), kLonger);
    if (p.kv_length >= longest_keys) longer = std::max(longer, block_rows(kItemsOfThread * threads, kLongest));
    if (rest(plan.block_rows) > kDecodingRows && rest(longer) > kDecodingRows) cut(longer);
  }
  int64_t blocks = plan.blocks_in_all;
  plan.together = rows <= kDecodingRows && !is_packed(p);
  plan.items = blocks * plan.splits;
  if (!plan.together) return plan;
  plan.block_rows = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(rows)));
  // Decoding is bound by memory: items have so many keys that an item's first reads, which nothing prefetches, and the
  // merge of the splits cost little. With 32 keys instead of 128 (1, 1024, 16, 64) takes 1.16 times as long in float32
  // and 1.29 in bfloat16.
  constexpr int64_t kBytes = 64 << 10, kKeys = 128;
  int64_t most = std::min(divide_up(p.kv_length, kKeys), plan.key_bytes / p.batch / kBytes);
  plan.splits = static_cast<int>(std::max<int64_t>(1, std::min(divide_up(kEnoughItems, p.batch), most)));
  plan.items = p.batch * plan.splits;
  return plan;
}

// q and dout are copied if a row keeps so many keys or more.
#if defined(JAX_FLASH_COPY_KEYS)  // set by tests, whose problems are short
constexpr int64_t kCopyKeys = JAX_FLASH_COPY_KEYS;
constexpr int64_t kTurnRows = 1, kTurnHeads = 1, kBlocksOfThread = 1;
#else
constexpr int64_t kCopyKeys = 480;
// BackwardPlan::in_turn needs so many rows and heads: with fewer rows blocks would wait for each other, with fewer
// heads the cache lines of a head's sums bounce between threads (one head of 8192 keys: 0.97 to 0.99 times the rate).
constexpr int64_t kTurnRows = 512, kTurnHeads = 4;
// Blocks of keys are longer if every thread has so many of them.
constexpr int64_t kBlocksOfThread = 12;
#endif

// Elements of the gradients of captured arrays.
int64_t captured_elements(const Problem& p) {
  return std::accumulate(p.dcaptured_elements, p.dcaptured_elements + p.options.dcaptured, int64_t{0});
}

// Each item has sums of its own for the gradients of captured arrays, which are added up in the order of items: so
// these gradients are the same in every run. What would take too much memory is one item.
void share_captured_sums(const Problem& p, BackwardPlan& plan) {
  constexpr int64_t kBytes = 64 << 20;
  const int64_t bytes = captured_elements(p) * int64_t{sizeof(double)};
  if (bytes == 0) return;
  const int64_t most = std::clamp<int64_t>(kBytes / bytes, 1, kEnoughItems);
  auto too_many = [&] { return int64_t{plan.batch_items} * plan.head_items * plan.chunk_items > most; };
  if (too_many()) plan.chunk_items = 1;
  if (too_many()) (plan.head_items > plan.batch_items ? plan.batch_items : plan.head_items) = 1;
  if (too_many()) plan.batch_items = plan.head_items = 1;
}

// Adds up the items' sums of the gradients of captured arrays.
void reduce_captured(const Problem& p, const BackwardPlan& plan, const ParallelFor& parallel_for) {
  const int64_t all = captured_elements(p);
  if (all == 0) return;
  const double* sums = static_cast<const double*>(p.scratch);
  for (int64_t i = 0, first = 0; i < p.options.dcaptured; first += p.dcaptured_elements[i++]) {
    constexpr int64_t kPart = 1 << 14;
    const int64_t count = p.dcaptured_elements[i], parts = divide_up(count, kPart);
    parallel_for(parts, parts, [&](int64_t part) {
      for (int64_t j = part * kPart; j < std::min(count, (part + 1) * kPart); ++j) {
        double sum = 0;
        for (int64_t item = 0; item < plan.items; ++item) sum += sums[item * all + first + j];
        static_cast<float*>(p.dcaptured[i])[j] = static_cast<float>(sum);
      }
    });
  }
}

// `record` is BackwardPlan::record of the kernels that serve the call.
BackwardPlan plan_backward(DType dtype, const Problem& p, int64_t threads, int64_t record) {
  BackwardPlan plan{};
  auto shares_bias = [&](long long stride) { return p.options.has_dbias && stride == 0; };
  plan.batch_items = shares_bias(p.bias_strides.batch) ? 1 : p.batch;
  plan.head_items = shares_bias(p.bias_strides.head) ? 1 : p.kv_heads;
  int64_t heads = int64_t{plan.batch_items} * plan.head_items;
  // Each chunk costs a sum of dq, so there are at most kMaxChunks, of at least 192 keys.
  plan.chunks = static_cast<int>(
      std::clamp<int64_t>(std::min(divide_up(kEnoughItems, heads), int64_t{p.kv_length} / 192), 1, kMaxChunks));
  plan.chunk_items = shares_bias(p.bias_strides.column) ? 1 : plan.chunks;
  share_captured_sums(p, plan);
  heads = int64_t{plan.batch_items} * plan.head_items;
  int64_t padding = record != 0 ? kPairedRows : 8;
  plan.padded_q_length = divide_up(p.q_length, padding) * padding;
  if (is_packed(p)) plan.padded_q_length += (int64_t{p.options.sequences} + 1) * padding;
  plan.padded_head_dim = divide_up(p.head_dim, 16) * 16;
  plan.row_blocks = static_cast<int>(block_count(p, p.q_length, kReduceRows));
  plan.reduce_items = int64_t{p.batch} * p.q_heads * plan.row_blocks;
  // To read a row in place costs 7% of its products with a block of keys, or 13% if q and dout of a head do not stay in
  // the caches. To copy it costs 2 to 4% of its products with kCopyKeys keys.
  int64_t keys = average_length(p, p.kv_length);
  if (p.options.causal) keys /= 2;
  for (int64_t side : {p.options.window_left, p.options.window_right}) keys = std::min(keys, 2 * side);
  plan.copies = keys >= kCopyKeys && average_length(p, p.q_length) >= kReduceRows;
  // Records begin at multiples of kReduceRows rows of the array; the tiles of a packed sequence do not.
  if (record != 0 && is_packed(p)) plan.copies = false;
  plan.record = plan.copies ? record : 0;
  bool alone = heads == int64_t{p.batch} * p.kv_heads && !shares_bias(p.bias_strides.column);
  plan.in_turn = plan.copies && p.q_length >= kTurnRows && heads >= kTurnHeads && alone && !is_packed(p) &&
                 !p.options.has_dalibi_slopes && p.options.dcaptured == 0;
  // Longer blocks of keys read q and dout less often: 1.02 to 1.04 times the rate of 96 keys with head_dim 128, 1.00 to
  // 1.01 with 64, but 0.9 with 3 blocks a thread. Not with segments and intervals, where shorter blocks skip more.
  plan.keys = kBackwardKeys;
  int64_t tiles = kMostBackwardKeys * (int64_t{3} * p.head_dim + 2 * p.value_head_dim) * computed_size_of(dtype);
  if (plan.in_turn && !skips_blocks(p) && tiles <= second_level_cache() / 2 &&
      heads * divide_up(p.kv_length, kMostBackwardKeys) >= kBlocksOfThread * threads) {
    plan.keys = kMostBackwardKeys;
  }
  plan.blocks = static_cast<int>(divide_up(p.kv_length, plan.keys));
  if (plan.in_turn) plan.chunks = plan.chunk_items = 1;
  if (plan.in_turn && !skips_blocks(p)) plan.reduce_items = 0;
  plan.items = heads * (plan.in_turn ? plan.blocks : plan.chunk_items);
  int64_t parts = int64_t{plan.chunks} * p.batch;
  int64_t rows = int64_t{p.batch} * p.q_heads * (plan.copies && plan.record == 0 ? p.q_length : 0);
  constexpr int kPreparedRows = 16;
  plan.prepared_rows = plan.record != 0 ? kReduceRows : kPreparedRows;
  plan.prepare_items = p.batch * divide_up(p.q_length, plan.prepared_rows);
  plan.dq = divide_up(2 * plan.items * captured_elements(p), 16) * 16;
  plan.q_copy = plan.dq + parts * p.q_heads * plan.padded_q_length * plan.padded_head_dim;
  plan.dout_copy = plan.q_copy + rows * plan.padded_head_dim + plan.prepare_items * p.q_heads * plan.record;
  plan.touched = plan.dout_copy + rows * (divide_up(p.value_head_dim, 16) * 16);
  plan.dslopes = plan.touched + parts * p.kv_heads * plan.row_blocks;
  int64_t with_slopes = p.options.has_dalibi_slopes ? parts * p.q_heads : 0;
  plan.slope_sums = plan.dslopes + with_slopes * p.options.sequences;
  plan.delta = plan.slope_sums + with_slopes * 2 * p.q_length;
  plan.row_lse = plan.delta + int64_t{p.batch} * p.q_heads * p.q_length;
  plan.row_rest = plan.row_lse + int64_t{p.batch} * p.q_heads * p.q_length;
  plan.scratch = plan.row_rest + int64_t{p.batch} * p.q_heads * p.q_length;
  return plan;
}

// Elements of a record at most: a bound over the instruction sets that multiply pairs.
int64_t largest_record(const Problem& p) {
  int64_t columns = divide_up(p.head_dim, 16) * 16 + divide_up(p.value_head_dim, 16) * 16;
  int64_t pairs = divide_up(p.head_dim, 32) * 16 + divide_up(p.value_head_dim, 32) * 16;
  return kReduceRows * pairs + kReduceRows / 2 * columns;
}

// How many threads a pass is worth. Each should have some 30 microseconds of work, since waking a thread and waiting
// for it may take as long: (1, 64, 1, 16) took 18 us on two threads and 4 on one, (1, 64, 4, 64) 59 and 25.
constexpr double kBytesOfThread = 6e5;
int64_t worthwhile_threads(DType dtype, const Problem& p, double flops_of_pair) {
  double columns = p.head_dim + p.value_head_dim;
  double rows = static_cast<double>(p.batch) * p.q_heads * p.q_length;
  double flops = flops_of_pair * rows * static_cast<double>(p.kv_length) * columns;
  double bytes = static_cast<double>(key_bytes(dtype, p));
  constexpr double kFlops = 6e6;
  return static_cast<int64_t>(std::clamp(std::max(flops / kFlops, bytes / kBytesOfThread), 1.0, 1e6));
}

// How many threads the preparing pass is worth, which reads out and dout.
int64_t threads_to_read(DType dtype, const Problem& p) {
  double elements = 2.0 * p.batch * p.q_length * p.q_heads * p.value_head_dim;
  return 1 + static_cast<int64_t>(elements * static_cast<double>(size_of(dtype)) / kBytesOfThread);
}

// Throws std::invalid_argument here, where it may be thrown: the kernels are compiled without exceptions.
void check_functions(DType dtype, const Problem& p) {
  if (!p.options.functions) return;
  if (dtype == DType::f64) throw std::invalid_argument("score and mask functions take no float64");
  functions_of(p.options.functions);
}

// Zeros the gradient of bias, which the items add to.
void clear_dbias(DType dtype, const Problem& p, const ParallelFor& parallel_for) {
  if (!p.dbias) return;
  const Strides& s = p.bias_strides;
  auto size = [](long long stride, int size) { return stride == 0 ? int64_t{1} : size; };
  int64_t elements =
      size(s.batch, p.batch) * size(s.head, p.q_heads) * size(s.row, p.q_length) * size(s.column, p.kv_length);
  int64_t bytes = elements * computed_size_of(dtype);
  constexpr int64_t kPart = 1 << 20;
  int64_t parts = divide_up(bytes, kPart);
  parallel_for(parts, parts, [&](int64_t part) {
    std::memset(static_cast<char*>(p.dbias) + part * kPart, 0, std::min(kPart, bytes - part * kPart));
  });
}

}  // namespace

void Turns::wait(int64_t block, int tile) const {
  for (int looks = 0; passed_[block].load(std::memory_order_acquire) <= tile; ++looks) {
    if (failed_.load(std::memory_order_relaxed)) return;
    constexpr int kLooks = 1000;
    if (looks >= kLooks) std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

std::string isa() { return chosen().bf16->name; }

int64_t backward_scratch(DType dtype, const Problem& problem) {
  int64_t scratch = plan_backward(dtype, problem, 1, 0).scratch;
  if (dtype != DType::bf16) return scratch;
  return std::max(scratch, plan_backward(dtype, problem, 1, largest_record(problem)).scratch);
}

void forward(DType dtype, const Problem& problem, int64_t threads, const ParallelFor& parallel_for) {
  check_functions(dtype, problem);
  const Kernels& k = kernels(dtype);
  ForwardPlan plan = plan_forward(dtype, problem, threads);
  size_t bytes = k.forward_workspace(dtype, problem, plan);
  // Bounded: at most kEnoughItems splits in all, of at most 48 rows, or of kDecodingRows a head.
  size_t partial_bytes = 0;
  Buffer partials;
  if (plan.splits > 1 || plan.together) {
    partial_bytes = k.forward_partial(dtype, problem, plan) * plan.blocks_in_all * plan.splits;
    partials = allocate(partial_bytes);
  }
  ask_for_large_pages(problem.out, problem.batch, dtype);
  parallel_for(plan.items, worthwhile_threads(dtype, problem, 2),
               [&](int64_t item) { k.forward(dtype, problem, plan, item, workspace(bytes), partials.get()); });
  if (plan.splits == 1) return;
  parallel_for(plan.blocks_in_all, 1 + static_cast<int64_t>(static_cast<double>(partial_bytes) / kBytesOfThread),
               [&](int64_t item) { k.forward_combine(dtype, problem, plan, item, workspace(bytes), partials.get()); });
}

void backward(DType dtype, const Problem& problem, int64_t threads, const ParallelFor& parallel_for) {
  check_functions(dtype, problem);
  const Kernels& k = backward_kernels(dtype, problem);
  BackwardPlan plan = plan_backward(dtype, problem, threads, k.backward_record(dtype, problem));
  size_t bytes = k.backward_workspace(dtype, problem, plan);
  ask_for_large_pages(problem.scratch, plan.scratch * computed_size_of(dtype));
  for (const Tensor* x : {&problem.dq, &problem.dk, &problem.dv}) ask_for_large_pages(*x, problem.batch, dtype);
  clear_dbias(dtype, problem, parallel_for);
  int64_t worthwhile = worthwhile_threads(dtype, problem, 5);
  parallel_for(plan.prepare_items, plan.copies ? worthwhile : std::min(worthwhile, threads_to_read(dtype, problem)),
               [&](int64_t item) { k.backward_prepare(dtype, problem, plan, item, workspace(bytes)); });
  if (plan.in_turn) {
    std::vector<std::atomic<int>> passed(plan.items);
    std::atomic<bool> failed{false};
    Turns turns(passed.data(), failed);
    parallel_for(plan.items, worthwhile, [&](int64_t item) {
      try {
        k.backward(dtype, problem, plan, item, workspace(bytes), &turns);
      } catch (...) {
        failed = true;
        throw;
      }
    });
  } else {
    parallel_for(plan.items, worthwhile,
                 [&](int64_t item) { k.backward(dtype, problem, plan, item, workspace(bytes), nullptr); });
  }
  reduce_captured(problem, plan, parallel_for);
  if (plan.reduce_items == 0) return;
  parallel_for(plan.reduce_items, worthwhile,
               [&](int64_t item) { k.backward_reduce(dtype, problem, plan, item, workspace(bytes)); });
}

}  // namespace jax_flash::cpu
