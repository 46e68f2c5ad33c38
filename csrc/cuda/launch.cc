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
#include "tiles.h"

namespace jax_flash::cuda {
namespace {

constexpr int kDqWarps = 4;  // of jax_flash_backward_dq, a block

int tile_head_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }
int64_t row_tiles(const Problem& p) { return (static_cast<int64_t>(p.q_length) + 15) / 16; }

// The kernel family that serves a compute capability, or "" for none. JAX_FLASH_CUDA_FAMILY forces another one, so
// that a newer GPU can run the kernels of an older one.
std::string family_of(int compute_capability) {
  struct Family {
    const char* name;
    int from;  // compute capability
  };
  static constexpr Family kFamilies[] = {{"sm80", 80}};
  const char* forced = std::getenv("JAX_FLASH_CUDA_FAMILY");
  std::string known;
  for (const Family& family : kFamilies) {
    if ((!forced || std::string(forced) == family.name) && compute_capability >= family.from) return family.name;
    known += std::string(known.empty() ? "" : ", ") + family.name;
  }
  if (forced) {
    throw std::runtime_error("JAX_FLASH_CUDA_FAMILY must be one of " + known +
                             ", for a GPU that is new enough for it, got " + forced);
  }
  return "";
}

std::string served_family(int arch) {
  std::string family = family_of(arch);
  if (family.empty()) {
    throw std::invalid_argument("no kernels for compute capability " + std::to_string(arch / 10) + "." +
                                std::to_string(arch % 10));
  }
  return family;
}

Variant variant_of(const std::string& family, int arch, Pass pass, DType dtype, int head_dim, const Options& options) {
  return Variant{family, arch, pass, dtype, head_dim, options, tile_row(family, pass, head_dim, arch)};
}

int arch_of(int device) {
  static std::mutex mutex;
  static std::map<int, int> archs;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = archs.find(device);
  if (found == archs.end()) found = archs.emplace(device, Driver::get().compute_capability(device)).first;
  return found->second;
}

// What tells the kernels of one call from another's: the values of the option record that are compiled in.
using Key = std::array<int64_t, 24>;
Key key_of(int device, Pass pass, DType dtype, const Problem& problem) {
  Key key{};
  size_t next = 0;
  key[next++] = device;
  key[next++] = static_cast<int64_t>(pass);
  key[next++] = static_cast<int64_t>(dtype);
  key[next++] = problem.head_dim;
#define JAX_FLASH_CONSTANT(type, name) key.at(next++) = static_cast<int64_t>(problem.options.name);
#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_OPERAND(type, name) key.at(next++) = problem.options.has_##name;
  JAX_FLASH_OPTIONS(JAX_FLASH_CONSTANT, JAX_FLASH_NOTHING, JAX_FLASH_OPERAND)
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_NOTHING
#undef JAX_FLASH_CONSTANT
  return key;
}

// The way of every call: one look-up. The first call of a kind goes through the door of jit.
Loaded find(int device, Pass pass, DType dtype, const Problem& problem) {
  static std::mutex mutex;
  static std::map<Key, Loaded> found;
  const Key key = key_of(device, pass, dtype, problem);
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto entry = found.find(key);
    if (entry != found.end()) return entry->second;
  }
  if (dtype != DType::f16 && dtype != DType::bf16) throw std::invalid_argument("query must be float16 or bfloat16");
  if (problem.head_dim % 8) throw std::invalid_argument("head_dim must be a multiple of 8");
  const int arch = arch_of(device);
  const Loaded loaded =
      kernels_of(variant_of(served_family(arch), arch, pass, dtype, problem.head_dim, problem.options), device);
  std::lock_guard<std::mutex> lock(mutex);
  found.emplace(key, loaded);
  return loaded;
}

unsigned grid(int64_t blocks) {
  if (blocks > std::numeric_limits<int>::max()) throw std::invalid_argument("the call needs too many blocks");
  return static_cast<unsigned>(blocks);
}

}  // namespace

void prepare(int device, Pass pass, DType dtype, const Problem& problem) { find(device, pass, dtype, problem); }

void launch(int device, Stream stream, Pass pass, DType dtype, const Problem& problem) {
  const Loaded loaded = find(device, pass, dtype, problem);
  const Driver& driver = Driver::get();
  const CuStream on = static_cast<CuStream>(stream);
  const bool forward = pass == Pass::forward;
  const int64_t length = forward ? problem.q_length : problem.kv_length;
  const int64_t heads = forward ? problem.q_heads : problem.kv_heads;
  const int64_t blocks = (length + loaded.facts.block_rows - 1) / loaded.facts.block_rows * heads * problem.batch;
  if (!forward) driver.zero(problem.scratch, backward_scratch(problem), on);
  driver.launch(loaded.main, grid(blocks), loaded.facts.threads, loaded.facts.shared_bytes, on, &problem);
  if (!forward) {
    const int64_t items = static_cast<int64_t>(problem.batch) * problem.q_heads * row_tiles(problem);
    driver.launch(loaded.dq, grid((items + kDqWarps - 1) / kDqWarps), 32 * kDqWarps, 0, on, &problem);
  }
}

// One float accumulator for dQ, in whole tiles of 16 rows.
int64_t backward_scratch(const Problem& p) {
  return static_cast<int64_t>(p.batch) * p.q_heads * row_tiles(p) * 16 * tile_head_dim((p.head_dim + 7) / 8 * 8);
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

std::string fetch(int arch, Pass pass, DType dtype, int head_dim, const Options& options) {
  return fetch(variant_of(served_family(arch), arch, pass, dtype, head_dim, options)).origin;
}

std::vector<Kernel> build_common(int arch, const std::vector<DType>& dtypes, const std::vector<int>& head_dims,
                                 const std::string& out_dir) {
  const std::string family = served_family(arch);
  std::vector<Variant> variants;
  for (Pass pass : {Pass::forward, Pass::backward}) {
    for (DType dtype : dtypes) {
      for (int head_dim : head_dims) {
        for (bool causal : {false, true}) {
          Options options{};
          options.causal = causal;
          variants.push_back(variant_of(family, arch, pass, dtype, head_dim, options));
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
