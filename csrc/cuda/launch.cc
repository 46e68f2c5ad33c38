// Picks the variant of a call, and launches it.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <future>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "cuda.h"
#include "disk_cache.h"
#include "driver.h"
#include "jit.h"
#include "tensor_maps.h"
#include "tiles.h"
#include "tuned.h"

namespace jax_flash::cuda {
namespace {

constexpr Pass kPasses[] = {Pass::forward, Pass::backward, Pass::backward_dq, Pass::backward_bias};

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
int64_t whole_fours(int64_t x) { return divide_up(x, 4) * 4; }

// Blocks of `size` rows in a batch entry, as csrc/cuda/shared/part.cuh counts them.
int64_t blocks_of(const Problem& p, int64_t length, int size) {
  return p.options.has_cu_q_lengths ? length / size + p.options.documents + 1 : divide_up(length, size);
}

// The kernel family that serves a compute capability, or "" for none. Another one may be forced, so that a newer GPU
// can run the kernels of an older one: `by` is what asks for it.
std::string family_of(int compute_capability, const std::string& forced, const char* by) {
  struct Family {
    const char* name;
    int from, to;  // compute capabilities
  };
  static constexpr int kAll = std::numeric_limits<int>::max();
  static constexpr Family kFamilies[] = {{"sm90a", 90, 90}, {"sm80", 80, kAll}, {"sm75", 75, kAll}, {"sm70", 70, kAll}};
  std::string known;
  for (const Family& family : kFamilies) {
    const bool runs = compute_capability >= family.from && compute_capability <= family.to;
    if (runs && (forced.empty() || forced == family.name)) return family.name;
    known += std::string(known.empty() ? "" : ", ") + family.name;
  }
  if (!forced.empty()) {
    throw std::runtime_error(std::string(by) + " must be one of " + known + ", for a GPU that can run it, got " +
                             forced);
  }
  return "";
}

std::string family_of(int compute_capability) {
  const char* forced = std::getenv("JAX_FLASH_CUDA_FAMILY");
  return family_of(compute_capability, forced ? forced : "", "JAX_FLASH_CUDA_FAMILY");
}

std::string served_family(int arch) {
  std::string family = family_of(arch);
  if (family.empty()) {
    throw std::invalid_argument("no kernels for compute capability " + std::to_string(arch / 10) + "." +
                                std::to_string(arch % 10));
  }
  return family;
}

// The family whose kernel serves a pass: that of the GPU, or where it has none, sm80 in place of sm90a.
std::string pass_family(const std::string& family, int arch, int parts, Pass pass, int head_dim, bool plain = false) {
  return family == "sm90a" && !find_tile_row(family, parts, pass, head_dim, arch, plain) ? "sm80" : family;
}

// Whether dQ has a pass of its own. Volta's kernels have no other way, nor have those for arrays in two parts; and
// Hopper's are faster so above head_dim 128, where a block owns 64 keys only and would add to dQ all the more often.
bool deterministic(const std::string& family, const Options& options, int largest_head_dim) {
  return options.deterministic || options.highest_precision || family == "sm70" ||
         (family == "sm90a" && largest_head_dim > 128);
}

// `gpu` is the driver's name of the device whose tuned rows come first; empty: the table's alone.
Variant variant_of(const std::string& device_family, int arch, Pass pass, DType dtype, int head_dim, int value_head_dim,
                   const Options& options, int rows = 0, const std::string& gpu = "") {
  const int parts = options.highest_precision ? 2 : 1;
  const int largest = std::max(head_dim, value_head_dim);
  const bool own_dq = deterministic(device_family, options, largest);
  // Up to head_dim 128 Hopper's backward is made for its dQ: without it some options find too few registers.
  const bool without_dq = device_family == "sm90a" && pass == Pass::backward && own_dq && largest <= 128;
  const bool wants_registers = options.has_unscales || options.has_q_lengths || options.has_kv_lengths;
  const bool plain = is_plain(options) && !(without_dq && wants_registers);
  const std::string family = pass_family(device_family, arch, parts, pass, largest, plain);
  if (dtype == DType::f32 || dtype == DType::f64) {
    throw std::invalid_argument("kernels are for float16 and bfloat16; float32 comes as float16 with unscales");
  }
  if (dtype == DType::bf16 && (family == "sm70" || family == "sm75")) {
    throw std::invalid_argument("kernels of " + family + " are for float16; bfloat16 comes as float16 with unscales");
  }
  if (options.highest_precision && !options.has_unscales) {
    throw std::invalid_argument("highest_precision is for float16 arrays in two parts, which come with unscales");
  }
  const TileRow& tile = tile_row(family, parts, pass, largest, arch, plain, rows);
  Variant variant{family, arch, pass, dtype, head_dim, value_head_dim, options, tile, rows};
  const bool tunable = plain && !without_dq && !options.has_unscales && head_dim == value_head_dim;
  if (!gpu.empty() && tunable) {
    if (auto row = tuned_row(gpu, family, pass, head_dim)) variant.set_tuned(*row);
  }
  const bool forward = pass == Pass::forward || pass == Pass::forward_few || pass == Pass::forward_tiny;
  variant.options.deterministic = !forward && own_dq;
  return variant;
}

int arch_of(int device) {
  static std::mutex mutex;
  static std::map<int, int> archs;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = archs.find(device);
  if (found == archs.end()) found = archs.emplace(device, Driver::get().compute_capability(device)).first;
  return found->second;
}

int multiprocessors_of(int device) {
  static std::mutex mutex;
  static std::map<int, int> counts;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = counts.find(device);
  if (found == counts.end()) found = counts.emplace(device, Driver::get().multiprocessors(device)).first;
  return found->second;
}

// Whether elements of dbias have addends of many blocks. Those that all rows or all keys share have not: see
// shared/backward_block.cuh.
bool shares_bias(const Problem& p) {
  const Strides& s = p.dbias_strides;
  return p.options.has_dbias && s.row && s.column && ((!s.batch && p.batch > 1) || (!s.head && p.q_heads > 1));
}

const std::string& name_of(int device) {
  static std::mutex mutex;
  static std::map<int, std::string> names;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = names.find(device);
  if (found == names.end()) found = names.emplace(device, Driver::get().device_name(device)).first;
  return found->second;
}

// Whether there is nothing but scale and causal.
bool only_causal(const Options& options) {
  bool absent = true;
#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_FEATURE(type, name, value) absent &= options.name == value;
#define JAX_FLASH_OPERAND(type, name, dims) absent &= !options.has_##name;
  JAX_FLASH_OPTIONS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_FEATURE, JAX_FLASH_OPERAND, JAX_FLASH_OPERAND)
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_NOTHING
  return absent;
}

// Whether the kernel for tiny problems serves calls with these options and head dims.
bool serves_tiny(const std::string& family, int arch, const Options& options, int head_dim, int value_head_dim) {
  const int largest = std::max(head_dim, value_head_dim);
  return only_causal(options) && head_dim % 16 == 0 && value_head_dim % 16 == 0 &&
         find_tile_row(pass_family(family, arch, 1, Pass::forward_tiny, largest), 1, Pass::forward_tiny, largest, arch);
}

// Whether all elements are so near to the first that an int says how far.
bool fits_int(const Problem& p) {
  auto fits = [&](const Tensor& t, int64_t rows, int64_t heads, int64_t columns) {
    const int64_t last = (p.batch - 1) * t.batch_stride + (rows - 1) * t.row_stride + (heads - 1) * t.head_stride;
    return last + columns <= std::numeric_limits<int>::max();
  };
  return fits(p.q, divide_up(p.q_length, 16) * 16, p.q_heads, p.head_dim) &&
         fits(p.k, divide_up(p.kv_length, 16) * 16, p.kv_heads, p.head_dim) &&
         fits(p.v, divide_up(p.kv_length, 16) * 16, p.kv_heads, p.value_head_dim) &&
         fits(p.out, divide_up(p.q_length, 16) * 16, p.q_heads, p.value_head_dim);
}

// block_q of the forward's blocks; 0: as the table's first row has it. Up to head_dim 64 Hopper's blocks of 192 rows
// make 557 TFLOP/s and those of 128 rows 485; but where blocks are few, they are done the sooner the smaller they are.
constexpr int kShortRows = 128;
int rows_of_blocks(Pass pass, const Problem& p) {
  if (pass != Pass::forward || std::max(p.head_dim, p.value_head_dim) > 64) return 0;
  if (p.options.highest_precision || !is_plain(p.options)) return 0;
  auto time = [&](int64_t rows, double rate) {
    const int64_t blocks = divide_up(p.q_length, rows) * p.q_heads * p.batch;
    const int64_t whole = rows * p.kv_length;  // a block's scores
    // Under causal blocks keep half of them in the mean, the longest all, and go longest first.
    const int64_t scores = p.options.causal ? std::max(whole, blocks * (whole + rows * rows) / 2 / kMultiprocessors)
                                            : whole * divide_up(blocks, kMultiprocessors);
    return scores / rate;
  };
  return time(kShortRows, 485) < time(192, 557) ? kShortRows : 0;
}

// Whether the pass for few queries serves a call as plan_few() would have it.
bool serves_few(const std::string& family, int arch, const Problem& p, const FewPlan& plan) {
  const int parts = p.options.highest_precision ? 2 : 1, largest = std::max(p.head_dim, p.value_head_dim);
  const std::string of = pass_family(family, arch, parts, Pass::forward_few, largest);
  return plan.rows && find_tile_row(of, parts, Pass::forward_few, largest, arch, is_plain(p.options), plan.rows);
}

// What tells the kernels of one call from another's: among it the values of the option record that are compiled in.
auto key_of(int device, Pass pass, DType dtype, const Problem& problem, const ForwardPlan& plan, int rows) {
  auto number = [](auto x) { return static_cast<int64_t>(x); };
#define JAX_FLASH_CONSTANT(type, name) number(problem.options.name),
#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_FEATURE(type, name, absent) number(problem.options.name != absent),
#define JAX_FLASH_OPERAND(type, name, dims) number(problem.options.has_##name),
#define JAX_FLASH_TRAINABLE(type, name, dims) number(problem.options.has_##name), number(problem.options.has_d##name),
  // What differs most often comes first, where keys are compared.
  return std::array{number(device),
                    number(pass),
                    number(dtype),
                    number(problem.head_dim),
                    number(problem.value_head_dim),
                    number(tuned_generation()),
                    number(2 * plan.few.rows + plan.tiny),
                    number(rows),
                    number(pass == Pass::backward && shares_bias(problem)),
                    JAX_FLASH_OPTIONS(JAX_FLASH_CONSTANT, JAX_FLASH_NOTHING, JAX_FLASH_FEATURE, JAX_FLASH_OPERAND,
                                      JAX_FLASH_TRAINABLE)};
#undef JAX_FLASH_TRAINABLE
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_NOTHING
#undef JAX_FLASH_CONSTANT
}
using Key = decltype(key_of(0, Pass::forward, DType::f16, Problem{}, ForwardPlan{}, 0));

}  // namespace

struct Found {
  Loaded main;
  Loaded dq;    // empty unless dQ has a pass of its own
  Loaded bias;  // empty unless the gradient of bias has one
  Pass pass;    // main's
};

namespace {

// The way of every call: one look-up. The first call of a kind goes through the door of jit. What is found stays where
// it is.
const Found& find(int device, Pass pass, DType dtype, const Problem& problem, const ForwardPlan& plan) {
  static std::mutex mutex;
  static std::map<Key, Found> all;
  const int rows = rows_of_blocks(pass, problem);
  const Key key = key_of(device, pass, dtype, problem, plan, rows);
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto entry = all.find(key);
    if (entry != all.end()) return entry->second;
  }
  if (problem.head_dim % 8 || problem.value_head_dim % 8) {
    throw std::invalid_argument("head_dim and value_head_dim must be multiples of 8");
  }
  const int arch = arch_of(device);
  const std::string family = served_family(arch);
  // In one order, what blocks share is summed up by a pass of its own, and the others know nothing of it.
  const bool own_bias = pass == Pass::backward && problem.options.deterministic && shares_bias(problem);
  auto kernels = [&](Pass of, int rows = 0) {
    Options options = problem.options;
    if (own_bias) options.has_dbias = of == Pass::backward_bias;
    return kernels_of(
        variant_of(family, arch, of, dtype, problem.head_dim, problem.value_head_dim, options, rows, name_of(device)),
        device);
  };
  Pass main = pass;
  if (serves_few(family, arch, problem, plan.few)) main = Pass::forward_few;
  if (plan.tiny && serves_tiny(family, arch, problem.options, problem.head_dim, problem.value_head_dim)) {
    main = Pass::forward_tiny;
  }
  const int main_rows = main == Pass::forward_few ? plan.few.rows : main == pass && family == "sm90a" ? rows : 0;
  Found found{kernels(main, main_rows), {}, {}, main};
  const int largest = std::max(problem.head_dim, problem.value_head_dim);
  if (pass == Pass::backward && deterministic(family, problem.options, largest)) found.dq = kernels(Pass::backward_dq);
  if (own_bias) found.bias = kernels(Pass::backward_bias);
  std::lock_guard<std::mutex> lock(mutex);
  return all.emplace(key, found).first->second;
}

int64_t extent(int64_t stride, int64_t size) { return stride ? size : 1; }

// Of dbias: [batch, heads] planes of [rows, columns].
int64_t bias_planes(const Problem& p) {
  return extent(p.dbias_strides.batch, p.batch) * extent(p.dbias_strides.head, p.q_heads);
}

bool is_tiny(const Problem& p, const FewPlan& few) {
  const int64_t blocks = divide_up(p.q_length, 16) * p.q_heads * p.batch;
  return few.rows && p.kv_length <= kTinyKeys && blocks <= kMultiprocessors && fits_int(p);
}

// What a slice of the keys leaves for jax_flash_combine: see Scratch in shared/forward_few.cuh.
int64_t slice_elements(const Problem& p) {
  return int64_t{p.batch} * p.q_heads * p.q_length * (int64_t{p.value_head_dim} + 2);
}

// Keys are split as far as the scratch has room: of a call that was lowered for another batch size or in another
// environment, that may be less than what forward_scratch() says, or nothing.
ForwardPlan plan_of(Pass pass, const Problem& problem, int64_t room) {
  if (pass != Pass::forward) return {};
  FewPlan few = plan_few(problem);
  if (few.slices > 1) {
    few.slices = static_cast<int>(std::clamp<int64_t>(room / slice_elements(problem), 1, few.slices));
  }
  return {few, is_tiny(problem, few)};
}

int64_t bias_elements(const Problem& p) {
  return bias_planes(p) * extent(p.dbias_strides.row, p.q_length) * extent(p.dbias_strides.column, p.kv_length);
}

// One float accumulator for dQ, in whole tiles of 16 rows and of up to 32 columns; behind it one sum for the gradient
// of a slope for every 16 keys (shared/backward_block.cuh).
int64_t dq_scratch(const Problem& p) {
  return int64_t{p.batch} * p.q_heads * blocks_of(p, p.q_length, 16) * 16 * divide_up(p.head_dim, 32) * 32;
}
int64_t slope_scratch(const Problem& p) {
  return p.options.has_dalibi_slopes ? int64_t{p.batch} * p.q_heads * blocks_of(p, p.kv_length, 16) : 0;
}

// Whether the call asks for an accumulator of dQ.
bool accumulates_dq(const Problem& p) { return !(p.options.deterministic || p.options.highest_precision); }

// Elements of float that shares of a group's query heads leave for jax_flash_sum_splits (Problem::group_sums).
int64_t sums_of_splits(const Problem& p, int splits) {
  return int64_t{splits} * p.batch * p.kv_heads * p.kv_length * (p.head_dim + p.value_head_dim);
}
// Whether these find room in dq, which nobody has written yet.
bool sums_fit_dq(const Problem& p, int splits) {
  const int64_t elements = int64_t{p.batch} * p.q_length * p.q_heads * p.head_dim;
  return sums_of_splits(p, splits) * 4 <= elements * (p.options.has_unscales ? 4 : 2);
}

constexpr int64_t kAnyRoom = std::numeric_limits<int64_t>::max();

// What sums of shares cost, in tiles of rows: 128 KB a block that are written and read again, and a launch.
constexpr int64_t kSumSteps = 8;

// Into how many shares a group is split; `common`: all add to one sum, beside an accumulator of dQ. `room` is for all
// that lies in the scratch.
int shares_of_groups(const Problem& p, bool common, int64_t room) {
  const int64_t group = p.q_heads / p.kv_heads;
  const int largest = std::max(p.head_dim, p.value_head_dim);
  // Of Hopper's blocks in calls without options; of rows with fewer keys there are more blocks than are counted here.
  const int keys = largest <= 64 ? 256 : largest <= 128 ? 128 : 64;
  const int64_t blocks = blocks_of(p, p.kv_length, keys) * p.kv_heads * p.batch;
  const int64_t tiles =
      divide_up(p.q_length, int64_t{64} * p.options.documents);  // of rows, for each query head of a block
  // Under causal the longest block is twice as long as most are, and has to end with the others.
  const int64_t enough = (p.options.causal ? 2 : 1) * kMultiprocessors;
  // What the last multiprocessor has to do, in tiles of rows.
  auto steps = [&](int64_t splits) {
    const int64_t longest = tiles * (group / splits), all = blocks * splits;
    const int64_t loop =
        p.options.causal ? std::max(longest, longest * all / enough) : longest * divide_up(all, enough);
    return loop + (splits > 1 ? kSumSteps : 0);
  };
  auto have_room = [&](int splits) {
    if (common) return sums_fit_dq(p, 1);
    // In place of the accumulator, behind the sums of slopes, no more than that.
    const int64_t slopes = slope_scratch(p), wanted = whole_fours(slopes) + sums_of_splits(p, splits);
    return sums_fit_dq(p, splits) || (wanted <= slopes + dq_scratch(p) && wanted <= room);
  };
  int64_t best = 1;
  for (int64_t splits = 2; splits <= group && blocks * best < enough; ++splits) {
    if (group % splits != 0) continue;
    if (!have_room(static_cast<int>(splits))) break;
    if (10 * steps(splits) <= 9 * steps(best)) best = splits;
  }
  return static_cast<int>(best);
}

// All zeros where the kernel asks for none.
TensorMap tensor_map(const Tensor& tensor, const char* name, int box_rows, const Problem& p, int length, int heads,
                     int head_dim) {
  if (!box_rows) return {};
  // XLA aligns its arrays, and parts of them that it hands over are whole rows, whose heads are multiples of 16 bytes.
  if (reinterpret_cast<uintptr_t>(tensor.data) % 16) {
    throw std::invalid_argument(std::string(name) + " must begin at a multiple of 16 bytes");
  }
  auto size = [](int64_t x) { return static_cast<unsigned long long>(x); };
  return Driver::get().tensor_map(
      tensor.data, {size(head_dim), size(length), size(heads), size(p.batch)},
      {size(2 * tensor.row_stride), size(2 * tensor.head_stride), size(2 * tensor.batch_stride)},
      {kBoxColumns, static_cast<unsigned>(box_rows), 1, 1});
}

TensorMaps tensor_maps(const LaunchFacts& facts, const Problem& p) {
  return {tensor_map(p.q, "query", facts.q_box_rows, p, p.q_length, p.q_heads, p.head_dim),
          tensor_map(p.k, "key", facts.k_box_rows, p, p.kv_length, p.kv_heads, p.head_dim),
          tensor_map(p.v, "value", facts.v_box_rows, p, p.kv_length, p.kv_heads, p.value_head_dim),
          tensor_map(p.dout, "dout", facts.dout_box_rows, p, p.q_length, p.q_heads, p.value_head_dim)};
}

// Up to 1024 keys a second launch costs what slices save (plan_few); a cluster saves it. Of 32 heads on 8 key heads at
// T 1, S 1024, head_dim 128, blocks alone take 8.4 us, clusters of 2, 4 and 8 take 6.1, 4.3 and 3.5; but two blocks
// take 3.1 instead of 2.5 for one head's 128 keys, and four take 4.6 like two for 256 keys of head_dim 256 (H200): so
// there are 128 keys or 64 KB for every block at least. And no more blocks than half of the multiprocessors: four times
// 32 of them take 7.3, two times 32 6.5.
constexpr int kClusterKeys = 128, kClusterBytes = 1 << 16;

std::atomic<int64_t> launched{0}, captured{0}, recorded{0};

unsigned grid(int64_t blocks) {
  if (blocks > std::numeric_limits<int>::max()) throw std::invalid_argument("the call needs too many blocks");
  return static_cast<unsigned>(blocks);
}

}  // namespace

void prepare(int device, Pass pass, DType dtype, const Problem& problem, int64_t room) {
  find(device, pass, dtype, problem, plan_of(pass, problem, room));
}

namespace {

// A grid, and what its kernel gets.
struct Launch {
  const Loaded& loaded;
  CuKernel kernel;
  Problem problem;
  TensorMaps maps;
  bool has_maps;
  unsigned blocks;
  unsigned threads;
  unsigned cluster;
  unsigned shared_bytes;
  bool in_scratch;  // whether its blocks leave their results there, for a second kernel
};

// Of a kernel whose blocks own `length` rows or keys together, of each of `heads` heads.
Launch launch_of(int device, const Loaded& loaded, const Problem& problem, int length, int64_t heads) {
  const LaunchFacts& facts = loaded.facts;
  int64_t blocks = blocks_of(problem, length, facts.block_rows) * heads * problem.batch;
  grid(blocks);  // items are counted in an int
  if (facts.persistent) blocks = std::min(blocks, int64_t{facts.persistent} * multiprocessors_of(device));
  const bool has_maps = facts.q_box_rows || facts.k_box_rows || facts.v_box_rows || facts.dout_box_rows;
  const unsigned threads = facts.threads, shared_bytes = facts.shared_bytes;
  return {loaded, loaded.main,  problem, tensor_maps(facts, problem), has_maps, grid(blocks), threads,
          1,      shared_bytes, false};
}

// Blocks for every slice of the keys of every head.
Launch few_launch_of(const Loaded& loaded, const Problem& problem, int slices) {
  const bool heads_share = !problem.options.has_cu_q_lengths;
  const int64_t rows = int64_t{problem.q_length} * (heads_share ? problem.q_heads / problem.kv_heads : 1);
  const int64_t sets = int64_t{problem.batch} * (heads_share ? problem.kv_heads : problem.q_heads);
  const int64_t blocks = blocks_of(problem, rows, loaded.facts.block_rows) * sets;
  const LaunchFacts& facts = loaded.facts;
  const bool in_scratch = slices > 1;
  unsigned cluster = 1, threads = facts.threads, shared_bytes = facts.shared_bytes;
  if (!in_scratch) {
    const int64_t bytes = int64_t{2} * problem.kv_length * (problem.head_dim + problem.value_head_dim);
    const int64_t enough = std::max(int64_t{problem.kv_length} / kClusterKeys, bytes / kClusterBytes);
    const int64_t wanted = std::min(kMultiprocessors / 2 / blocks, enough);
    while (2 * slices <= std::min<int64_t>(wanted, facts.most_cluster)) slices *= 2;
    cluster = slices;
    if (cluster > 1) shared_bytes += facts.cluster_bytes;
  }
  Launch launch{loaded,  loaded.main, problem,      {},        false, grid(blocks * slices),
                threads, cluster,     shared_bytes, in_scratch};
  launch.problem.kv_slices = slices;
  if (!in_scratch) launch.problem.scratch = nullptr;  // by which the kernel knows a cluster's slices
  return launch;
}

// A warp for every 16 keys, and one for every 16 columns of values.
Launch tiny_launch_of(const Loaded& loaded, const Problem& problem) {
  const LaunchFacts& facts = loaded.facts;
  const int64_t warps = divide_up(std::max(problem.kv_length, problem.value_head_dim), 16);
  const int64_t blocks = blocks_of(problem, problem.q_length, facts.block_rows) * problem.q_heads * problem.batch;
  const unsigned shared_bytes = facts.shared_bytes;
  return {loaded, loaded.main,  problem, {}, false, grid(blocks), static_cast<unsigned>(32 * warps),
          1,      shared_bytes, false};
}

Launch forward_launch(int device, const Found& found, const ForwardPlan& plan, const Problem& problem) {
  switch (found.pass) {
    case Pass::forward_tiny: return tiny_launch_of(found.main, problem);
    case Pass::forward_few: return few_launch_of(found.main, problem, plan.few.slices);
    default: return launch_of(device, found.main, problem, problem.q_length, problem.q_heads);
  }
}

// What puts together what a launch has left in scratch.
Launch combine_launch(const Launch& main) {
  const Problem& problem = main.problem;
  const int warps = main.loaded.facts.combine_warps;
  const int64_t results = int64_t{problem.batch} * problem.q_heads * problem.q_length;
  const unsigned blocks = grid(divide_up(results, problem.kv_slices <= warps ? warps : 1));
  return {main.loaded, main.loaded.combine, problem, {}, false, blocks, static_cast<unsigned>(32 * warps), 1, 0, false};
}

void run(const Launch& launch, CuStream stream) {
  const Driver& driver = Driver::get();
  const LaunchFacts& facts = launch.loaded.facts;
  const void* const arguments[] = {&launch.problem, &launch.maps};
  if (facts.starts_ahead) {
    driver.launch_small(launch.kernel, launch.blocks, launch.threads, launch.shared_bytes, stream, arguments,
                        launch.cluster);
  } else {
    driver.launch(launch.kernel, launch.blocks, launch.threads, launch.shared_bytes, stream, arguments);
  }
}

// The heads of a group as rows of one head, where each has a single row of query and nothing tells them apart: a tile
// serves all of them.
Problem heads_as_rows(const Problem& of_call) {
  Problem p = of_call;
  const int group = p.q_heads / p.kv_heads;
  if (p.q_length > 1 || group == 1 || p.options.causal || p.options.has_q_lengths || !is_plain(p.options)) return p;
  for (Tensor* rows : {&p.q, &p.dout, &p.dq}) {
    rows->row_stride = rows->head_stride;
    rows->head_stride *= group;
  }
  p.q_length = group;
  p.q_heads = p.kv_heads;
  return p;
}

}  // namespace

Recorded record(int device, DType dtype, const Problem& problem, int64_t room) {
  const ForwardPlan plan = plan_of(Pass::forward, problem, room);
  return {device, &find(device, Pass::forward, dtype, problem, plan), plan};
}

std::vector<GraphNode> graph_nodes(const Recorded& recorded, const Problem& problem) {
  const Found& found = *recorded.found;
  const Launch launch = forward_launch(recorded.device, found, recorded.plan, problem);
  std::vector<GraphNode> nodes;
  auto add = [&](const Launch& of, const char* name) {
    nodes.push_back({name, found.main.cubin, of.blocks, of.cluster, of.threads, of.shared_bytes,
                     found.main.facts.starts_ahead != 0, of.problem, of.maps, of.has_maps});
  };
  add(launch, found.main.name);
  if (launch.in_scratch) add(combine_launch(launch), kCombine);
  return nodes;
}

void launch(int device, Stream stream, Pass pass, DType dtype, const Problem& of_call, int64_t room) {
  const ForwardPlan plan = plan_of(pass, of_call, room);
  const Found& found = find(device, pass, dtype, of_call, plan);
  const Driver& driver = Driver::get();
  const CuStream on = static_cast<CuStream>(stream);
  ++launched;
  if (driver.capturing(on)) ++captured;
  if (pass == Pass::forward) {
    const Launch forward = forward_launch(device, found, plan, of_call);
    run(forward, on);
    if (forward.in_scratch) run(combine_launch(forward), on);
    return;
  }

  Problem problem = heads_as_rows(of_call);
  const int warps = found.main.facts.convert_warps;
  const int64_t zeros = (warps ? dq_scratch(problem) : 0) + slope_scratch(problem);
  if (room < zeros) {
    throw std::invalid_argument("scratch must have at least " + std::to_string(zeros) +
                                " elements for sums of dq and of the gradient of slopes, got " + std::to_string(room));
  }
  if (zeros) driver.zero(problem.scratch, zeros, on);
  if (problem.dbias && !found.bias.main) driver.zero(problem.dbias, bias_elements(problem), on);
  const bool common = !found.dq.main;  // kernels that add dQ add these too
  problem.group_splits = found.main.sum_splits ? shares_of_groups(problem, common, room) : 1;
  if (problem.group_splits > 1) {
    problem.group_sums = common || sums_fit_dq(problem, problem.group_splits)
                             ? problem.dq.data
                             : static_cast<float*>(problem.scratch) + whole_fours(zeros);
    if (common) driver.zero(problem.group_sums, sums_of_splits(problem, 1), on);
  }
  run(launch_of(device, found.main, problem, problem.kv_length, int64_t{problem.kv_heads} * problem.group_splits), on);
  const void* const arguments[] = {&problem};
  if (problem.group_splits > 1) {
    const int64_t fours = sums_of_splits(problem, 1) / 4;
    driver.launch(found.main.sum_splits, grid(divide_up(fours, 32 * kSplitWarps)), 32 * kSplitWarps, 0, on, arguments);
  }
  if (found.dq.main) run(launch_of(device, found.dq, problem, problem.q_length, problem.q_heads), on);
  if (found.bias.main) {
    const LaunchFacts& facts = found.bias.facts;
    const int64_t tiles =
        divide_up(problem.q_length, facts.block_rows) * divide_up(problem.kv_length, facts.block_keys);
    driver.launch(found.bias.main, grid(bias_planes(problem) * tiles), facts.threads, facts.shared_bytes, on,
                  arguments);
  }
  if (warps) {
    const int64_t items = int64_t{problem.batch} * problem.q_heads * blocks_of(problem, problem.q_length, 16);
    driver.launch(found.main.convert_dq, grid(divide_up(items, warps)), 32 * warps, 0, on, arguments);
  }
  if (found.main.sum_slopes) {
    const int64_t items = int64_t{problem.batch} * problem.options.documents * problem.q_heads;
    driver.launch(found.main.sum_slopes, grid(divide_up(items, kSlopeWarps)), 32 * kSlopeWarps, 0, on, arguments);
  }
}

void count_recorded() {
  ++launched;
  ++captured;
  ++recorded;
}

Launches launches() { return {launched, captured, recorded}; }

FewPlan plan_few(const Problem& p) {
  const char* wanted_at_all = std::getenv("JAX_FLASH_FEW_QUERIES");
  if (wanted_at_all && std::string(wanted_at_all) == "0") return {0, 1};
  const bool documents = p.options.has_cu_q_lengths;
  const int64_t group = documents ? 1 : p.q_heads / p.kv_heads, sets = int64_t{p.batch} * (p.q_heads / group);
  const int64_t rows = p.q_length * group;  // that may share a block
  auto blocks = [&](int64_t size) { return divide_up(rows, size) * sets; };
  // More rows than a block has go to the kernels for many, as soon as these have blocks for two multiprocessors of
  // five.
  const int64_t many = blocks_of(p, p.q_length, 128) * p.q_heads * p.batch;
  if (rows > 64 && 5 * many > 2 * kMultiprocessors) return {0, 1};
  const bool small = p.kv_length <= 1024;
  const int block = rows <= 32 || (small && blocks(16) <= kMultiprocessors) ? 16 : 64;
  // As many slices as there are multiprocessors for, of 256 keys or more. With twice as many a head's slices of 64 rows
  // took 1.5 times as long (T 64, S 8192, 32 heads), by what they leave for each other in scratch. Up to 1024 keys the
  // second launch costs what slices save.
  const int64_t slices = small ? 1 : std::min(kMultiprocessors / blocks(block), int64_t{p.kv_length} / 256);
  return {block, static_cast<int>(std::clamp<int64_t>(slices, 1, kMostSlices))};
}

bool is_tiny(const Problem& p) { return is_tiny(p, plan_few(p)); }

int64_t forward_scratch(DType, const Problem& p) {
  const int slices = plan_few(p).slices;
  return slices == 1 ? 0 : slices * slice_elements(p);
}

int64_t backward_scratch(DType, const Problem& p) {
  const int64_t zeros = (accumulates_dq(p) ? dq_scratch(p) : 0) + slope_scratch(p);
  if (accumulates_dq(p)) return zeros;  // sums find room in dq, or are not split
  const int splits = shares_of_groups(p, false, kAnyRoom);
  return splits == 1 || sums_fit_dq(p, splits) ? zeros : whole_fours(zeros) + sums_of_splits(p, splits);
}

int group_splits(const Problem& p) { return shares_of_groups(p, accumulates_dq(p), kAnyRoom); }

Status status() {
  Status status;
  std::string error;
  for (const Nvrtc& nvrtc : nvrtcs(&error)) status.nvrtc.push_back(nvrtc.version() + " (" + nvrtc.path() + ")");
  status.nvrtc_error = error;
  const KernelFolder cache = KernelFolder::cache(true);
  if (cache.usable()) status.cache_dir = cache.path();
  status.cache_problem = cache.problem();
  try {
    const Driver& driver = Driver::get();
    const int version = driver.version();
    status.driver = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    for (int i = 0; i < driver.device_count(); ++i) {
      const int arch = driver.compute_capability(i);
      status.devices.push_back({driver.device_name(i), arch, family_of(arch)});
    }
  } catch (const std::runtime_error& e) {
    status.driver_error = e.what();
  }
  return status;
}

std::string fetch(int arch, Pass pass, DType dtype, int head_dim, int value_head_dim, const Options& options,
                  const std::string& gpu) {
  return fetch(variant_of(served_family(arch), arch, pass, dtype, head_dim, value_head_dim, options, 0, gpu)).origin;
}

Choice choose(int arch, Pass pass, int head_dim, const std::string& gpu) {
  const Variant variant =
      variant_of(served_family(arch), arch, pass, DType::f16, head_dim, head_dim, Options{}, 0, gpu);
  return {variant.family, variant.tile, variant.tuned, 1024 * shared_kb_of(arch)};
}

Kernel build_row(int arch, Pass pass, DType dtype, int head_dim, const Options& options, const TileRow& row,
                 const std::string& out_dir) {
  Variant variant = variant_of(served_family(arch), arch, pass, dtype, head_dim, head_dim, options);
  variant.set_tuned(row);
  return build(variant, out_dir);
}

bool separate_dq(int arch, int largest_head_dim) {
  return deterministic(served_family(arch), Options{}, largest_head_dim);
}

int largest_head_dim(int arch, bool highest_precision) {
  const std::string family = served_family(arch);
  for (int head_dim = 256; head_dim > 0; head_dim -= 8) {
    bool served = true;
    for (Pass pass : kPasses) {
      const int parts = highest_precision ? 2 : 1;
      served = served && find_tile_row(pass_family(family, arch, parts, pass, head_dim), parts, pass, head_dim, arch);
    }
    if (served) return head_dim;
  }
  return 0;
}

std::vector<Kernel> build(int arch, const std::vector<DType>& dtypes, const std::vector<std::pair<int, int>>& head_dims,
                          const std::vector<Options>& options, const std::string& out_dir, const std::string& forced,
                          const std::vector<Pass>& passes) {
  const std::string family = forced.empty() ? served_family(arch) : family_of(arch, forced, "family");
  std::vector<Variant> variants;
  for (Pass pass : passes) {
    for (DType dtype : dtypes) {
      for (auto [head_dim, value_head_dim] : head_dims) {
        for (const Options& record : options) {
          const int largest = std::max(head_dim, value_head_dim), parts = record.highest_precision ? 2 : 1;
          if (pass == Pass::backward_dq && !deterministic(family, record, largest)) continue;
          if (pass == Pass::backward_bias && !(record.deterministic && record.has_dbias)) continue;
          auto add = [&](int rows) {
            variants.push_back(variant_of(family, arch, pass, dtype, head_dim, value_head_dim, record, rows));
          };
          if (pass == Pass::forward_tiny && !serves_tiny(family, arch, record, head_dim, value_head_dim)) continue;
          const std::string of = pass_family(family, arch, parts, pass, largest);
          if (pass != Pass::forward_few) {
            add(0);
            if (pass == Pass::forward && of == "sm90a" && largest <= 64 && is_plain(record)) add(kShortRows);
            continue;
          }
          for (int rows : kFewRows) {
            if (find_tile_row(of, parts, pass, largest, arch, is_plain(record), rows)) add(rows);
          }
        }
      }
    }
  }
  // NVRTC compiles different programs at the same time.
  std::vector<Kernel> kernels(variants.size());
  std::vector<std::future<void>> workers;
  std::atomic<size_t> next{0};
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    workers.push_back(std::async(std::launch::async, [&] {
      for (size_t mine; (mine = next++) < variants.size();) kernels[mine] = build(variants[mine], out_dir);
    }));
  }
  for (std::future<void>& worker : workers) worker.wait();
  for (std::future<void>& worker : workers) worker.get();
  return kernels;
}

}  // namespace jax_flash::cuda
