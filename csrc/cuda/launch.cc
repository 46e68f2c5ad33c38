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
#include "driver.h"
#include "jit.h"
#include "tensor_maps.h"
#include "tiles.h"

namespace jax_flash::cuda {
namespace {

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Blocks of `size` rows in a batch entry, as csrc/cuda/shared/part.cuh counts them.
int64_t blocks_of(const Problem& p, int length, int size) {
  return p.options.has_cu_q_lengths ? int64_t{length} / size + p.options.documents + 1 : divide_up(length, size);
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

Variant variant_of(const std::string& device_family, int arch, Pass pass, DType dtype, int head_dim, int value_head_dim,
                   const Options& options) {
  const int parts = options.highest_precision ? 2 : 1;
  const int largest = std::max(head_dim, value_head_dim);
  const bool own_dq = deterministic(device_family, options, largest);
  // Hopper's rule for backward counts on dQ: without it ptxas finds too few registers for as many keys.
  const bool plain = is_plain(options) && !(device_family == "sm90a" && pass == Pass::backward && own_dq);
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
  const TileRow& tile = tile_row(family, parts, pass, largest, arch, plain);
  Variant variant{family, arch, pass, dtype, head_dim, value_head_dim, options, tile};
  variant.options.deterministic = pass != Pass::forward && own_dq;
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

// What tells the kernels of one call from another's: the values of the option record that are compiled in.
using Key = std::array<int64_t, 48>;
Key key_of(int device, Pass pass, DType dtype, const Problem& problem) {
  Key key{};
  size_t next = 0;
  key[next++] = device;
  key[next++] = static_cast<int64_t>(pass);
  key[next++] = static_cast<int64_t>(dtype);
  key[next++] = problem.head_dim;
  key[next++] = problem.value_head_dim;
#define JAX_FLASH_CONSTANT(type, name) key.at(next++) = static_cast<int64_t>(problem.options.name);
#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_FEATURE(type, name, absent) key.at(next++) = problem.options.name != absent;
#define JAX_FLASH_OPERAND(type, name, dims) key.at(next++) = problem.options.has_##name;
#define JAX_FLASH_TRAINABLE(type, name, dims)  \
  key.at(next++) = problem.options.has_##name; \
  key.at(next++) = problem.options.has_d##name;
  JAX_FLASH_OPTIONS(JAX_FLASH_CONSTANT, JAX_FLASH_NOTHING, JAX_FLASH_FEATURE, JAX_FLASH_OPERAND, JAX_FLASH_TRAINABLE)
#undef JAX_FLASH_TRAINABLE
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_NOTHING
#undef JAX_FLASH_CONSTANT
  return key;
}

struct Found {
  Loaded main;
  Loaded dq;  // empty unless dQ has a pass of its own
};

// The way of every call: one look-up. The first call of a kind goes through the door of jit.
Found find(int device, Pass pass, DType dtype, const Problem& problem) {
  static std::mutex mutex;
  static std::map<Key, Found> all;
  const Key key = key_of(device, pass, dtype, problem);
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
  auto kernels = [&](Pass of) {
    return kernels_of(variant_of(family, arch, of, dtype, problem.head_dim, problem.value_head_dim, problem.options),
                      device);
  };
  Found found{kernels(pass), {}};
  const int largest = std::max(problem.head_dim, problem.value_head_dim);
  if (pass == Pass::backward && deterministic(family, problem.options, largest)) found.dq = kernels(Pass::backward_dq);
  std::lock_guard<std::mutex> lock(mutex);
  all.emplace(key, found);
  return found;
}

int64_t bias_elements(const Problem& p) {
  auto extent = [](int64_t stride, int64_t size) { return stride ? size : 1; };
  const Strides& s = p.bias_strides;
  return extent(s.batch, p.batch) * extent(s.head, p.q_heads) * extent(s.row, p.q_length) *
         extent(s.column, p.kv_length);
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

unsigned grid(int64_t blocks) {
  if (blocks > std::numeric_limits<int>::max()) throw std::invalid_argument("the call needs too many blocks");
  return static_cast<unsigned>(blocks);
}

}  // namespace

void prepare(int device, Pass pass, DType dtype, const Problem& problem) { find(device, pass, dtype, problem); }

void launch(int device, Stream stream, Pass pass, DType dtype, const Problem& problem) {
  const Found found = find(device, pass, dtype, problem);
  const Driver& driver = Driver::get();
  const CuStream on = static_cast<CuStream>(stream);
  auto run = [&](const Loaded& loaded, int length, int64_t heads) {
    const LaunchFacts& facts = loaded.facts;
    const TensorMaps maps = tensor_maps(facts, problem);
    const void* const arguments[] = {&problem, &maps};
    int64_t blocks = blocks_of(problem, length, facts.block_rows) * heads * problem.batch;
    grid(blocks);  // items are counted in an int
    if (facts.persistent) blocks = std::min(blocks, int64_t{facts.persistent} * multiprocessors_of(device));
    driver.launch(loaded.main, grid(blocks), facts.threads, facts.shared_bytes, on, arguments);
  };
  if (pass == Pass::forward) return run(found.main, problem.q_length, problem.q_heads);

  const int warps = found.main.facts.convert_warps;
  if (warps) driver.zero(problem.scratch, backward_scratch(dtype, problem), on);
  if (problem.dbias) driver.zero(problem.dbias, bias_elements(problem), on);
  if (problem.dalibi_slopes) {
    driver.zero(problem.dalibi_slopes, int64_t{problem.batch} * problem.options.documents * problem.q_heads, on);
  }
  run(found.main, problem.kv_length, problem.kv_heads);
  if (found.dq.main) run(found.dq, problem.q_length, problem.q_heads);
  if (warps) {
    const int64_t items = problem.batch * problem.q_heads * blocks_of(problem, problem.q_length, 16);
    const void* const arguments[] = {&problem};
    driver.launch(found.main.convert_dq, grid(divide_up(items, warps)), 32 * warps, 0, on, arguments);
  }
}

// One float accumulator for dQ, in whole tiles of 16 rows and of up to 32 columns.
int64_t backward_scratch(DType, const Problem& p) {
  if (p.options.deterministic || p.options.highest_precision) return 0;
  return int64_t{p.batch} * p.q_heads * blocks_of(p, p.q_length, 16) * 16 * divide_up(p.head_dim, 32) * 32;
}

Status status() {
  Status status;
  std::string error;
  for (const Nvrtc& nvrtc : nvrtcs(&error)) status.nvrtc.push_back(nvrtc.version() + " (" + nvrtc.path() + ")");
  status.nvrtc_error = error;
  status.cache_dir = cache_dir();
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

std::string fetch(int arch, Pass pass, DType dtype, int head_dim, int value_head_dim, const Options& options) {
  return fetch(variant_of(served_family(arch), arch, pass, dtype, head_dim, value_head_dim, options)).origin;
}

int largest_head_dim(int arch, bool highest_precision) {
  const std::string family = served_family(arch);
  for (int head_dim = 256; head_dim > 0; head_dim -= 8) {
    bool served = true;
    for (Pass pass : {Pass::forward, Pass::backward, Pass::backward_dq}) {
      const int parts = highest_precision ? 2 : 1;
      served = served && find_tile_row(pass_family(family, arch, parts, pass, head_dim), parts, pass, head_dim, arch);
    }
    if (served) return head_dim;
  }
  return 0;
}

std::vector<Kernel> build(int arch, const std::vector<DType>& dtypes, const std::vector<std::pair<int, int>>& head_dims,
                          const std::vector<Options>& options, const std::string& out_dir, const std::string& forced) {
  const std::string family = forced.empty() ? served_family(arch) : family_of(arch, forced, "family");
  std::vector<Variant> variants;
  for (Pass pass : {Pass::forward, Pass::backward, Pass::backward_dq}) {
    for (DType dtype : dtypes) {
      for (auto [head_dim, value_head_dim] : head_dims) {
        for (const Options& record : options) {
          const bool own_dq = deterministic(family, record, std::max(head_dim, value_head_dim));
          if (pass == Pass::backward_dq && !own_dq) continue;
          variants.push_back(variant_of(family, arch, pass, dtype, head_dim, value_head_dim, record));
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
