// Finds the kernels of a call, and launches them.

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "cuda/host/cuda.h"
#include "cuda/host/driver.h"
#include "cuda/host/family.h"
#include "cuda/host/jit.h"
#include "cuda/host/plan.h"
#include "cuda/host/tuned.h"
#include "cuda/tensor_maps.h"
#include "cuda/tiles.h"

namespace jax_flash::cuda {
namespace {

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
// device/backward_block.cuh.
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
                    number(2 * plan.split_kv.rows + plan.single_tile),
                    number(rows),
                    number(pass == Pass::backward && shares_bias(problem)),
                    static_cast<int64_t>(reinterpret_cast<intptr_t>(problem.options.functions)),
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

// The variants of a call.
struct Chosen {
  Variant main;
  std::optional<Variant> dq, bias;  // passes of their own
};

Chosen choose(int device, Pass pass, DType dtype, const Problem& problem, const ForwardPlan& plan) {
  if (problem.head_dim % 8 || problem.value_head_dim % 8) {
    throw std::invalid_argument("head_dim and value_head_dim must be multiples of 8");
  }
  const int arch = arch_of(device);
  const Family& family = served_family(arch);
  // In one order, what blocks share is summed up by a pass of its own, and the others know nothing of it.
  const bool own_bias = pass == Pass::backward && problem.options.separate_dq && shares_bias(problem);
  auto variant = [&](Pass of, int rows = 0) {
    Options options = problem.options;
    if (own_bias) options.has_dbias = of == Pass::backward_bias;
    return variant_of(family, arch, of, dtype, problem.head_dim, problem.value_head_dim, options, rows,
                      name_of(device));
  };
  Pass main = pass;
  if (serves_split_kv(family, arch, problem, plan.split_kv)) main = Pass::forward_split_kv;
  if (plan.single_tile && serves_single_tile(family, arch, problem.options, problem.head_dim, problem.value_head_dim)) {
    main = Pass::forward_single_tile;
  }
  const int largest = std::max(problem.head_dim, problem.value_head_dim);
  const int other_rows_up_to = pass == Pass::backward ? family.tall_tiles : family.short_blocks;
  const int rows = main == Pass::forward_split_kv                ? plan.split_kv.rows
                   : main == pass && largest <= other_rows_up_to ? rows_of_blocks(pass, problem)
                                                                 : 0;
  Chosen chosen{variant(main, rows), {}, {}};
  if (pass == Pass::backward && separate_dq(family, problem.options, largest)) {
    chosen.dq = variant(Pass::backward_dq);
  }
  if (own_bias) chosen.bias = variant(Pass::backward_bias);
  return chosen;
}

// The way of every call: one look-up. The first call of a kind loads its kernels. What is found stays where it is.
const Found& find(int device, Pass pass, DType dtype, const Problem& problem, const ForwardPlan& plan) {
  static std::mutex mutex;
  static std::map<Key, Found> all;
  const Key key = key_of(device, pass, dtype, problem, plan, rows_of_blocks(pass, problem));
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto entry = all.find(key);
    if (entry != all.end()) return entry->second;
  }
  const Chosen chosen = choose(device, pass, dtype, problem, plan);
  Found found{kernels_of(chosen.main, device), {}, {}, chosen.main.pass};
  if (chosen.dq) found.dq = kernels_of(*chosen.dq, device);
  if (chosen.bias) found.bias = kernels_of(*chosen.bias, device);
  std::lock_guard<std::mutex> lock(mutex);
  return all.emplace(key, found).first->second;
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

TensorMaps tensor_maps(const KernelTraits& traits, const Problem& p) {
  return {tensor_map(p.q, "query", traits.q_box_rows, p, p.q_length, p.q_heads, p.head_dim),
          tensor_map(p.k, "key", traits.k_box_rows, p, p.kv_length, p.kv_heads, p.head_dim),
          tensor_map(p.v, "value", traits.v_box_rows, p, p.kv_length, p.kv_heads, p.value_head_dim),
          tensor_map(p.dout, "dout", traits.dout_box_rows, p, p.q_length, p.q_heads, p.value_head_dim),
          tensor_map(p.dk, "dk", traits.dk_dv_box_rows, p, p.kv_length, p.kv_heads, p.head_dim),
          tensor_map(p.dv, "dv", traits.dk_dv_box_rows, p, p.kv_length, p.kv_heads, p.value_head_dim)};
}

// Up to 1024 keys a second launch costs what slices save (plan_split_kv); a cluster saves it. Of 32 heads on 8 key
// heads at T 1, S 1024, head_dim 128, blocks alone take 8.4 us, clusters of 2, 4 and 8 take 6.1, 4.3 and 3.5; but two
// blocks take 3.1 instead of 2.5 for one head's 128 keys, and four take 4.6 like two for 256 keys of head_dim 256
// (H200): so there are 128 keys or 64 KB for every block at least. And no more blocks than half of the multiprocessors:
// four times 32 of them take 7.3, two times 32 6.5.
constexpr int kClusterKeys = 128, kClusterBytes = 1 << 16;

std::atomic<int64_t> launched{0}, captured{0}, recorded{0};

unsigned grid(int64_t blocks) {
  if (blocks > std::numeric_limits<int>::max()) throw std::invalid_argument("the call needs too many blocks");
  return static_cast<unsigned>(blocks);
}

}  // namespace

void prepare(int device, Pass pass, DType dtype, const Problem& problem, int64_t scratch_elements) {
  find(device, pass, dtype, problem, plan_of(pass, problem, scratch_elements));
}

void begin_to_load(Pass pass, DType dtype, const Problem& problem, int64_t scratch_elements) {
  try {
    const int devices = Driver::get().device_count();
    const ForwardPlan plan = plan_of(pass, problem, scratch_elements);
    for (int device = 0; device < devices; ++device) {
      if (family_of(arch_of(device)) == nullptr) continue;  // the call is for others
      const Chosen chosen = choose(device, pass, dtype, problem, plan);
      begin_to_load(chosen.main);
      if (chosen.dq) begin_to_load(*chosen.dq);
      if (chosen.bias) begin_to_load(*chosen.bias);
    }
  } catch (const std::exception&) {
    // prepare() meets the same, when the call is one that XLA makes ready.
  }
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
  bool in_scratch;      // whether its blocks leave their results there, for a second kernel
  bool counts = false;  // its items of work, in scratch
  bool waits = false;   // on its own for the end of the kernel before it, which is so of all whose traits start ahead

  bool starts_ahead() const { return loaded.traits.starts_ahead || waits; }
};

// Of a kernel whose blocks own `length` rows or keys together, of each of `heads` heads.
Launch launch_of(int device, const Loaded& loaded, const Problem& problem, int length, int64_t heads) {
  const KernelTraits& traits = loaded.traits;
  const int64_t items = blocks_of(problem, length, traits.block_rows) * heads * problem.batch;
  int64_t blocks = items;
  grid(items);  // they are counted in an int
  if (traits.persistent && !problem.halved)
    blocks = std::min(items, int64_t{traits.persistent} * multiprocessors_of(device));
  const bool has_maps = traits.q_box_rows || traits.k_box_rows || traits.v_box_rows || traits.dout_box_rows;
  const unsigned threads = traits.threads, shared_bytes = traits.shared_bytes;
  Launch launch{loaded, loaded.main,  problem, tensor_maps(traits, problem), has_maps, grid(blocks), threads,
                1,      shared_bytes, false};
  if (traits.counts_items) {
    // Zeroing the counter takes as long as a small call.
    launch.counts = blocks < items && problem.scratch;
    if (!launch.counts) launch.problem.scratch = nullptr;
  }
  return launch;
}

// Blocks for every slice of the keys of every head.
Launch split_kv_launch_of(const Loaded& loaded, const Problem& problem, int slices) {
  const bool heads_share = heads_share_rows(problem.options.has_cu_q_lengths);
  const int64_t rows = int64_t{problem.q_length} * (heads_share ? problem.q_heads / problem.kv_heads : 1);
  const int64_t sets = int64_t{problem.batch} * (heads_share ? problem.kv_heads : problem.q_heads);
  const int64_t blocks = blocks_of(problem, rows, loaded.traits.block_rows) * sets;
  const KernelTraits& traits = loaded.traits;
  const bool in_scratch = slices > 1;
  unsigned cluster = 1, threads = traits.threads, shared_bytes = traits.shared_bytes;
  if (!in_scratch) {
    const int64_t bytes = int64_t{2} * problem.kv_length * (problem.head_dim + problem.value_head_dim);
    const int64_t enough = std::max(int64_t{problem.kv_length} / kClusterKeys, bytes / kClusterBytes);
    const int64_t wanted = std::min(kMultiprocessors / 2 / blocks, enough);
    while (2 * slices <= std::min<int64_t>(wanted, traits.most_cluster)) slices *= 2;
    cluster = slices;
    if (cluster > 1) shared_bytes += traits.cluster_bytes;
  }
  Launch launch{loaded,  loaded.main, problem,      {},        false, grid(blocks * slices),
                threads, cluster,     shared_bytes, in_scratch};
  launch.problem.kv_slices = slices;
  if (!in_scratch) launch.problem.scratch = nullptr;  // by which the kernel knows a cluster's slices
  return launch;
}

// A warp for every 16 keys, and one for every 16 columns of values.
Launch single_tile_launch_of(const Loaded& loaded, const Problem& problem) {
  const KernelTraits& traits = loaded.traits;
  const int64_t warps = ceil_div(std::max(problem.kv_length, problem.value_head_dim), 16);
  const int64_t blocks = blocks_of(problem, problem.q_length, traits.block_rows) * problem.q_heads * problem.batch;
  const unsigned shared_bytes = traits.shared_bytes;
  return {loaded, loaded.main,  problem, {}, false, grid(blocks), static_cast<unsigned>(32 * warps),
          1,      shared_bytes, false};
}

Launch forward_launch(int device, const Found& found, const ForwardPlan& plan, const Problem& problem) {
  switch (found.pass) {
    case Pass::forward_single_tile: return single_tile_launch_of(found.main, problem);
    case Pass::forward_split_kv: return split_kv_launch_of(found.main, problem, plan.split_kv.slices);
    default: return launch_of(device, found.main, problem, problem.q_length, problem.q_heads);
  }
}

// What puts together what a launch has left in scratch.
Launch combine_launch(const Launch& main) {
  const Problem& problem = main.problem;
  const int warps = main.loaded.traits.combine_warps;
  const int64_t results = int64_t{problem.batch} * problem.q_heads * problem.q_length;
  const unsigned blocks = grid(ceil_div(results, combines_by_warp(problem.kv_slices, warps) ? warps : 1));
  return {main.loaded, main.loaded.combine, problem, {}, false, blocks, static_cast<unsigned>(32 * warps), 1, 0, false};
}

// What computes the heads in float32 that the other kernels of the pass, which come before it, have passed over.
Launch float32_launch(int device, const Loaded& loaded, CuKernel kernel, const Problem& problem) {
  auto tiles = [&](int length) { return blocks_of(problem, length, kFloat32Tile); };
  // The items of work of all heads, in a backward, which has most.
  const int64_t items = int64_t{problem.batch} *
                        (problem.q_heads * tiles(problem.q_length) + 2 * problem.kv_heads * tiles(problem.kv_length));
  const unsigned blocks = std::min(int64_t{kFloat32Blocks} * multiprocessors_of(device), items);
  const bool waits = arch_of(device) >= 90;
  return {loaded, kernel, problem, {}, false, blocks, kFloat32Threads, 1, kFloat32SharedBytes, false, waits};
}

// `starts_ahead`: the kernel waits itself for the one before it.
void enqueue(bool starts_ahead, CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes,
             CuStream stream, const void* const* arguments, unsigned cluster = 1) {
  const Driver& driver = Driver::get();
  if (starts_ahead) {
    driver.launch_small(kernel, blocks, threads, shared_bytes, stream, arguments, cluster);
  } else {
    driver.launch(kernel, blocks, threads, shared_bytes, stream, arguments);
  }
}

void run(const Launch& launch, CuStream stream) {
  const void* const arguments[] = {&launch.problem, &launch.maps};
  enqueue(launch.starts_ahead(), launch.kernel, launch.blocks, launch.threads, launch.shared_bytes, stream, arguments,
          launch.cluster);
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

Recorded record(int device, DType dtype, const Problem& problem, int64_t scratch_elements) {
  const ForwardPlan plan = plan_of(Pass::forward, problem, scratch_elements);
  return {device, &find(device, Pass::forward, dtype, problem, plan), plan};
}

std::vector<GraphNode> graph_nodes(const Recorded& recorded, const Problem& problem) {
  const Found& found = *recorded.found;
  Launch launch = forward_launch(recorded.device, found, recorded.plan, problem);
  if (launch.counts) launch.problem.scratch = nullptr;  // XLA records kernels, and none that zeroes the counter
  std::vector<GraphNode> nodes;
  auto add = [&](const Launch& of, const char* name) {
    nodes.push_back({name, found.main.cubin, of.blocks, of.cluster, of.threads, of.shared_bytes, of.starts_ahead(),
                     of.problem, of.maps, of.has_maps});
  };
  add(launch, found.main.name);
  if (launch.in_scratch) add(combine_launch(launch), kCombine);
  if (found.main.float32) {
    add(float32_launch(recorded.device, found.main, found.main.float32, problem), kFloat32Forward);
  }
  return nodes;
}

void launch(int device, Stream stream, Pass pass, DType dtype, const Problem& of_call, int64_t scratch_elements) {
  const ForwardPlan plan = plan_of(pass, of_call, scratch_elements);
  const Found& found = find(device, pass, dtype, of_call, plan);
  const Driver& driver = Driver::get();
  const CuStream on = static_cast<CuStream>(stream);
  ++launched;
  if (driver.capturing(on)) ++captured;
  if (pass == Pass::forward) {
    const Launch forward = forward_launch(device, found, plan, of_call);
    if (forward.counts) driver.zero(forward.problem.scratch, 1, on);
    run(forward, on);
    if (forward.in_scratch) run(combine_launch(forward), on);
    if (found.main.float32) run(float32_launch(device, found.main, found.main.float32, of_call), on);
    return;
  }

  Problem problem = heads_as_rows(of_call);
  const int warps = found.main.traits.convert_warps;
  int64_t zeros = (warps ? dq_scratch(problem) : 0) + slope_scratch(problem);
  if (scratch_elements < zeros) {
    throw std::invalid_argument("scratch must have at least " + std::to_string(zeros) +
                                " elements for sums of dq and of the gradient of slopes, got " +
                                std::to_string(scratch_elements));
  }
  const bool adds_dq = !found.dq.main;
  const Shares shares = found.main.sum_splits ? shares_of_groups(problem, adds_dq, scratch_elements) : Shares{1, 1};
  problem.group_splits = shares.splits;
  problem.heads_of_share = problem.q_heads / (problem.kv_heads * shares.splits);
  problem.sums_of_group = shares.sums;
  const int block_keys = found.main.traits.block_rows;
  if (found.main.traits.halves_rows && halves_rows(problem, problem.group_splits, block_keys)) {
    const int64_t behind = zeros + blocks_of_keys(problem, block_keys);
    problem.halved = whole_fours(behind) + sums_of_halves(problem, block_keys) <= scratch_elements;
    if (problem.halved) {
      zeros = behind;
      problem.group_sums = static_cast<float*>(problem.scratch) + whole_fours(zeros);
    }
  }
  problem.dq_ahead = found.main.zero_dq ? zeroed_before(problem, block_keys) : 0;
  if (problem.options.ordered_dq) {
    problem.downwards_from = downwards_from(problem, block_keys);
    problem.downwards_group = downwards_group(problem);
  }
  const void* const arguments[] = {&problem};
  if (problem.dq_ahead) {
    driver.launch(found.main.zero_dq, grid(problem.dq_ahead), found.main.traits.zero_threads, 0, on, arguments);
  } else if (zeros) {
    // Of sums that are added in order the first addend is stored.
    const int64_t sums = warps && problem.options.ordered_dq ? dq_sums(problem) : 0;
    driver.zero(static_cast<float*>(problem.scratch) + sums, zeros - sums, on);
  }
  for (int i = 0; i < problem.options.dcaptured; ++i) {
    if (problem.dcaptured_elements[i]) driver.zero(problem.dcaptured[i], problem.dcaptured_elements[i], on);
  }
  if (problem.dbias && !found.bias.main) driver.zero(problem.dbias, bias_elements(problem), on);
  const bool splits = problem.group_splits > 1;
  // Beside dQ that is added they are not in dq, which is written before the last of them is there.
  const bool sums_in_dq = splits && !adds_dq && sums_fit_dq(problem, shares.sums);
  if (splits) {
    problem.group_sums = sums_in_dq ? problem.dq.data : static_cast<float*>(problem.scratch) + whole_fours(zeros);
    if (adds_dq && !problem.options.ordered_dq) driver.zero(problem.group_sums, sums_of_splits(problem, 1), on);
  }
  auto sum_shares = [&] {
    const int64_t fours = sums_of_splits(problem, 1) / 4;
    driver.launch(found.main.sum_splits, grid(ceil_div(fours, 32 * kSplitWarps)), 32 * kSplitWarps, 0, on, arguments);
  };
  Launch main =
      launch_of(device, found.main, problem, problem.kv_length, int64_t{problem.kv_heads} * problem.group_splits);
  main.blocks <<= problem.halved;
  run(main, on);
  if (sums_in_dq) sum_shares();
  if (found.dq.main) run(launch_of(device, found.dq, problem, problem.q_length, problem.q_heads), on);
  if (found.bias.main) {
    const KernelTraits& traits = found.bias.traits;
    const int64_t tiles =
        ceil_div(problem.q_length, traits.block_rows) * ceil_div(problem.kv_length, traits.block_keys);
    driver.launch(found.bias.main, grid(bias_planes(problem) * tiles), traits.threads, traits.shared_bytes, on,
                  arguments);
  }
  if (warps) {
    const int64_t items = int64_t{problem.batch} * problem.q_heads * dq_tiles(problem);
    // It may start ahead of the backward's end, but not of a kernel between, which reads sums where dq will be.
    const bool ahead = found.main.traits.converts_ahead && !sums_in_dq;
    enqueue(ahead, found.main.convert_dq, grid(ceil_div(items, warps)), 32 * warps, 0, on, arguments);
  }
  if (splits && !sums_in_dq) sum_shares();
  // Behind all that writes results of the heads that are computed here.
  if (found.main.float32) run(float32_launch(device, found.main, found.main.float32, problem), on);
  const Loaded& of_bias = found.bias.main ? found.bias : found.main;
  if (of_bias.float32_bias) run(float32_launch(device, of_bias, of_bias.float32_bias, problem), on);
  if (found.main.sum_slopes) {
    const int64_t items = int64_t{problem.batch} * problem.options.sequences * problem.q_heads;
    driver.launch(found.main.sum_slopes, grid(ceil_div(items, kSlopeWarps)), 32 * kSlopeWarps, 0, on, arguments);
  }
}

namespace {

// The way of every call: one look-up.
const Loaded& find_scale(int device, bool two_limbs, bool bfloat16, const Scaling& scaling) {
  static std::mutex mutex;
  static std::map<std::array<int, 4>, Loaded> all;
  int columns = 0;
  for (int i = 0; i < scaling.count; ++i) columns = std::max(columns, scaling.arrays[i].columns);
  const std::array<int, 4> key{device, two_limbs, bfloat16, columns};
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto entry = all.find(key);
    if (entry != all.end()) return entry->second;
  }
  Options options{};
  options.highest_precision = two_limbs;
  options.original_bfloat16 = bfloat16;
  const int arch = arch_of(device);
  const Loaded loaded = kernels_of(scale_variant(served_family(arch), arch, options, columns), device);
  std::lock_guard<std::mutex> lock(mutex);
  return all.emplace(key, loaded).first->second;
}

}  // namespace

void prepare_scale(int device, bool two_limbs, bool bfloat16, const Scaling& scaling) {
  find_scale(device, two_limbs, bfloat16, scaling);
}

void launch_scale(int device, Stream stream, bool two_limbs, bool bfloat16, const Scaling& scaling) {
  const Loaded& loaded = find_scale(device, two_limbs, bfloat16, scaling);
  const bool single = scaling.chunks == 1;
  const unsigned blocks = grid(int64_t{scaling.batch} * scaling.kv_heads * scaling.count * scaling.chunks);
  const unsigned threads = single ? loaded.traits.threads : 32 * kChunkWarps;
  const CuStream on = static_cast<CuStream>(stream);
  const void* const arguments[] = {&scaling};
  const bool ahead = arch_of(device) >= 90;
  auto run = [&](CuKernel kernel) {
    enqueue(ahead, kernel, blocks, threads, loaded.traits.shared_bytes, on, arguments);
  };
  if (!single) run(loaded.row_sizes);
  run(loaded.main);
}

void count_recorded() {
  ++launched;
  ++captured;
  ++recorded;
}

Launches launches() { return {launched, captured, recorded}; }

}  // namespace jax_flash::cuda
