#include "cuda/host/jit.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <semaphore>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/host/disk_cache.h"
#include "cuda/host/elf.h"
#include "cuda/host/family.h"

namespace jax_flash::cuda {
namespace fs = std::filesystem;
namespace {

std::mutex settings_mutex;
Settings the_settings;

std::mutex packs_mutex;
std::map<int, std::map<std::string, std::string>> packs;  // by compute capability, of the settings

// The cubin of a variant from the packs of prebuilt kernels.
std::optional<std::string> packed_cubin(const Settings& settings, int arch, const std::string& name,
                                        const std::string& key) {
  if (!settings.packed) return std::nullopt;
  // Held while Python unpacks, so that no two threads do. No thread waits here with the GIL, which that needs.
  std::lock_guard<std::mutex> lock(packs_mutex);
  auto found = packs.find(arch);
  if (found == packs.end()) found = packs.emplace(arch, settings.packed(arch)).first;
  const auto entry = found->second.find(entry_name(name, key));
  return entry == found->second.end() ? std::nullopt : cubin_in(entry->second, key);
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::f32: return "f32";
    default: return "f64";
  }
}

// The device sources, by the names that their includes use.
struct Sources {
  std::vector<Nvrtc::Header> files;
  std::string key;  // what they say
};

// Of the folder that is configured now: each is read once.
const Sources& sources() {
  static std::mutex mutex;
  static std::map<std::string, Sources> known;
  const std::string dir = settings().source_dir;
  std::lock_guard<std::mutex> lock(mutex);
  Sources& found = known[dir];
  if (!found.files.empty()) return found;
  const fs::path root = dir;
  auto read = [&](const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    if (!file.is_open() || text.bad()) throw std::runtime_error("can't read the device source " + path.string());
    return text.str();
  };
  std::vector<Nvrtc::Header> files;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(root, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->is_regular_file(error)) {
      files.push_back({fs::relative(entry->path(), root).generic_string(), read(entry->path())});
    }
    if (error) break;
  }
  // A part of them would be the sources of other kernels, or of none.
  if (error) throw std::runtime_error("can't list the device sources in " + root.string() + ": " + error.message());
  if (files.empty()) throw std::runtime_error("no device sources in " + root.string());
  std::sort(files.begin(), files.end(), [](auto& a, auto& b) { return a.name < b.name; });
  Hash hash;
  for (const Nvrtc::Header& header : files) hash.add(header.name).add(header.text);
  found = {std::move(files), hash.hex()};
  return found;
}

// What the sources say, whoever compiles them: the key of prebuilt kernels.
std::string source_key(const Variant& variant) {
  return Hash().add(sources_key()).add(variant.name()).add(variant.source()).hex();
}

std::vector<std::string> compile_options(const char* suffix, int target) {
  // Verbose costs nothing, and puts registers and spills into the log. Not every kernel uses every constant of its
  // variant (177).
  return {"--gpu-architecture=sm_" + std::to_string(target) + suffix, "--std=c++20", "--ptxas-options=-v",
          "--diag-suppress=177"};
}

Nvrtc nvrtc_for(int arch) {
  std::string error;
  const std::vector<Nvrtc> all = nvrtcs(&error);
  if (all.empty())
    throw std::runtime_error("no NVRTC to compile kernels with (install jax[cuda12] or [cuda13]): " + error);
  for (const Nvrtc& nvrtc : all) {
    if (nvrtc.target(arch)) return nvrtc;
  }
  std::string known;
  for (const Nvrtc& nvrtc : all) known += (known.empty() ? "" : ", ") + nvrtc.version();
  throw std::runtime_error("no NVRTC here (" + known + ") compiles for compute capability " +
                           std::to_string(arch / 10) + "." + std::to_string(arch % 10));
}

Nvrtc::Result compile(const Variant& variant, const Nvrtc& nvrtc) {
  return nvrtc.compile(variant.name(), variant.source(), sources().files,
                       compile_options(family_named(variant.family).suffix, nvrtc.target(variant.arch)));
}

// Tells a user, who is waiting for a call, what took the time, and how the next process need not. A line on stderr
// rather than a warning: nothing is wrong, and XLA's threads, which compile, hold no GIL.
void tell_compiled(const std::string& name, double seconds, const std::optional<std::string>& kept,
                   const KernelFolder& cache) {
  double least = 1;
  std::string complaint;
  if (const char* text = std::getenv("JAX_FLASH_NOTICE_SECONDS"); text && *text) {
    char* end = nullptr;
    const double wanted = std::strtod(text, &end);
    if (std::string(text) == "off") return;
    if (*end || !(wanted >= 0)) {
      complaint = std::string(" (it must be a number of at least 0, or off, got ") + text + ")";
    } else {
      least = wanted;
    }
  }
  if (complaint.empty() && seconds < least) return;
  std::string why;
  if (!kept) why = cache.problem().empty() ? ", which no cache keeps" : ", which no cache keeps: " + cache.problem();
  char time[32];
  std::snprintf(time, sizeof(time), "%.1f s", seconds);
  // In one write, so that the lines of several threads do not mix.
  const std::string line = "jax_flash: compiled " + name + " in " + time + why +
                           "; python -m jax_flash warmup compiles kernels ahead of calls, and "
                           "JAX_FLASH_NOTICE_SECONDS=off hides this line" +
                           complaint + "\n";
  std::fputs(line.c_str(), stderr);
}

// From the cache on disk, or compiled. `key` is what the sources say.
Fetched cached_or_compiled(const std::string& name, const std::string& source, const std::string& key, int arch,
                           const char* suffix) {
  const Nvrtc nvrtc = nvrtc_for(arch);
  const std::vector<std::string> options = compile_options(suffix, nvrtc.target(arch));
  Hash hash;
  hash.add(key).add(nvrtc.version());
  for (const std::string& option : options) hash.add(option);
  const std::string full_key = hash.hex();
  const KernelFolder cache = KernelFolder::cache(true);
  if (auto cubin = cache.read(name, full_key)) return {*cubin, "cached"};
  const auto began = std::chrono::steady_clock::now();
  std::string cubin = nvrtc.compile(name, source, sources().files, options).cubin;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  // A disk that can't take it costs the next process a compilation, and nothing else.
  tell_compiled(name, took.count(), cache.write(name, full_key, cubin), cache);
  return {std::move(cubin), "compiled"};
}

}  // namespace

Fetched fetch(const Variant& variant) {
  const std::string name = variant.name(), key = source_key(variant);
  const Settings settings = cuda::settings();
  for (const std::string& dir : settings.prebuilt_dirs) {
    if (auto cubin = KernelFolder::trusted(dir, false).read(name, key)) return {*cubin, "prebuilt"};
  }
  if (auto cubin = packed_cubin(settings, variant.arch, name, key)) return {*cubin, "prebuilt"};
  return cached_or_compiled(name, variant.source(), key, variant.arch, family_named(variant.family).suffix);
}

Fetched fetch_source(const std::string& name, const std::string& source, int arch) {
  return cached_or_compiled(name, source, Hash().add(sources_key()).add(name).add(source).hex(), arch, "");
}

namespace {

KernelTraits traits_of(const Elf& elf, Pass pass) {
  return elf.constant<KernelTraits>(std::string(entry_point(pass)) + "_traits");
}

Loaded load(const Variant& variant) {
  const Driver& driver = Driver::get();
  Loaded loaded{};
  loaded.cubin = new std::string(fetch(variant).cubin);
  loaded.name = entry_point(variant.pass);
  const std::string& cubin = *loaded.cubin;
  loaded.traits = traits_of(Elf(cubin), variant.pass);
  CuLibrary library = driver.load(cubin);
  loaded.main = driver.kernel(library, loaded.name);
  if (loaded.traits.convert_warps) loaded.convert_dq = driver.kernel(library, "jax_flash_convert_dq");
  if (loaded.traits.zero_threads) loaded.zero_dq = driver.kernel(library, "jax_flash_zero_dq");
  if (variant.pass == Pass::backward && variant.options.has_dalibi_slopes) {
    loaded.sum_slopes = driver.kernel(library, "jax_flash_sum_slopes");
  }
  if (loaded.traits.splits_groups) loaded.sum_splits = driver.kernel(library, "jax_flash_sum_splits");
  if (loaded.traits.combine_warps) loaded.combine = driver.kernel(library, kCombine);
  if (variant.pass == Pass::scale) loaded.row_sizes = driver.kernel(library, kRowSizes);
  if (const char* name = float32_entry(variant)) loaded.float32 = driver.kernel(library, name);
  if (has_float32_bias(variant)) loaded.float32_bias = driver.kernel(library, kFloat32Bias);
  return loaded;
}

// The number before `after` in what the assembler's log says of a kernel, 0 when it isn't said.
int log_number(const std::string& log, const std::string& kernel, const std::string& after) {
  size_t start = log.find("'" + kernel + "'");
  if (start == std::string::npos) return 0;
  size_t stop = log.find("Compiling entry function", start);
  size_t found = log.find(after, start);
  if (found == std::string::npos || found > stop) return 0;
  size_t digits = log.find_last_not_of(' ', found - 1);
  size_t first = log.find_last_not_of("0123456789", digits);
  return std::atoi(log.substr(first + 1, digits - first).c_str());
}

// Lines that warn that wgmma instructions are serialised or that setmaxnreg is ignored.
std::string compiler_warnings_of(const std::string& log) {
  std::istringstream lines(log);
  std::string found;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("Potential Performance Loss") != std::string::npos || line.find("setmaxnreg") != std::string::npos) {
      found += line + "\n";
    }
  }
  return found;
}

}  // namespace

const char* entry_point(Pass pass) {
  static constexpr const char* kNames[] = {
#define JAX_FLASH_PASS(name) "jax_flash_" #name,
      JAX_FLASH_PASSES(JAX_FLASH_PASS)
#undef JAX_FLASH_PASS
  };
  return kNames[static_cast<int>(pass)];
}
const char* float32_entry(const Variant& variant) {
  if (!variant.options.has_descale) return nullptr;
  switch (variant.pass) {
    case Pass::forward:
    case Pass::forward_split_kv: return kFloat32Forward;
    case Pass::backward: return kFloat32Backward;
    default: return nullptr;
  }
}
bool has_float32_bias(const Variant& variant) {
  return variant.options.has_descale && variant.options.has_dbias &&
         (variant.pass == Pass::backward || variant.pass == Pass::backward_bias);
}
const char* pass_name(Pass pass) { return entry_point(pass) + sizeof("jax_flash_") - 1; }

Settings settings() {
  std::lock_guard<std::mutex> lock(settings_mutex);
  return the_settings;
}

void configure(Settings settings) {
  {
    std::lock_guard<std::mutex> lock(settings_mutex);
    the_settings = std::move(settings);
  }
  std::lock_guard<std::mutex> lock(packs_mutex);
  packs.clear();
}

std::vector<Nvrtc> nvrtcs(std::string* error) { return Nvrtc::all(settings().nvrtc_paths, error); }

std::string Variant::name() const {
  std::string name = family + "-" + pass_name(pass) + "-" + dtype_name(dtype) + "-d" + std::to_string(head_dim);
  if (value_head_dim != head_dim) name += "-v" + std::to_string(value_head_dim);
  if (tuned) {
#define JAX_FLASH_FIELD(field) name += "-" #field + std::to_string(tile.field);
    JAX_FLASH_TILE_FIELDS(JAX_FLASH_FIELD)
#undef JAX_FLASH_FIELD
  }
#define JAX_FLASH_CONSTANT(type, option) \
  if (options.option) name += "-" #option;
#define JAX_FLASH_NOTHING(type, option)
#define JAX_FLASH_FEATURE(type, option, absent) \
  if (options.option != absent) name += "-" #option;
#define JAX_FLASH_OPERAND(type, option, dims) \
  if (options.has_##option) name += "-" #option;
#define JAX_FLASH_TRAINABLE(type, option, dims) \
  JAX_FLASH_OPERAND(type, option, dims)         \
  if (options.has_d##option) name += "-d" #option;
  JAX_FLASH_OPTIONS(JAX_FLASH_CONSTANT, JAX_FLASH_NOTHING, JAX_FLASH_FEATURE, JAX_FLASH_OPERAND, JAX_FLASH_TRAINABLE)
#undef JAX_FLASH_TRAINABLE
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_NOTHING
#undef JAX_FLASH_CONSTANT
  if (rows) name += "-q" + std::to_string(rows);
  if (options.functions) name += "-functions-" + Hash().add(options.functions).hex();
  return name + "-sm_" + std::to_string(arch);
}

std::string Variant::source() const {
  std::ostringstream out;
  // For what the preprocessor has to choose.
  out << "#define JAX_FLASH_LARGEST_HEAD_DIM " << std::max(head_dim, value_head_dim) << "\n"
      << "#include \"problem.h\"\nnamespace jax_flash {\n"
      << "constexpr DType dtype = DType::" << dtype_name(dtype) << ";\n"
      << "constexpr int head_dim = " << head_dim << ";\n"
      << "constexpr int value_head_dim = " << value_head_dim << ";\n"
      << std::boolalpha;
#define JAX_FLASH_CONSTANT(type, option) out << "constexpr " #type " option_" #option " = " << options.option << ";\n";
#define JAX_FLASH_NOTHING(type, option)
#define JAX_FLASH_FEATURE(type, option, absent) \
  out << "constexpr bool with_" #option " = " << (options.option != absent) << ";\n";
#define JAX_FLASH_OPERAND(type, option, dims) \
  out << "constexpr bool has_" #option " = " << options.has_##option << ";\n";
#define JAX_FLASH_TRAINABLE(type, option, dims) \
  JAX_FLASH_OPERAND(type, option, dims)         \
  out << "constexpr bool has_d" #option " = " << options.has_d##option << ";\n";
  JAX_FLASH_OPTIONS(JAX_FLASH_CONSTANT, JAX_FLASH_NOTHING, JAX_FLASH_FEATURE, JAX_FLASH_OPERAND, JAX_FLASH_TRAINABLE)
#undef JAX_FLASH_TRAINABLE
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_NOTHING
#undef JAX_FLASH_CONSTANT
#define JAX_FLASH_FIELD(field) out << "constexpr int " #field " = " << tile.field << ";\n";
  JAX_FLASH_TILE_FIELDS(JAX_FLASH_FIELD)
#undef JAX_FLASH_FIELD
  // Whether a lane has pairs of a row with keys 2 i and 2 i + 1, which functions may read of a table at once. With
  // sm80's kernels the compiler does not find out that it may, and spills.
  const bool pairs_of_keys = family == "sm90a" && (pass == Pass::forward || pass == Pass::backward_dq);
  out << "constexpr bool pairs_of_keys = " << pairs_of_keys << ";\n}  // namespace jax_flash\n";
  if (options.functions) {
    out << "#include \"cuda/device/function_operations.cuh\"\n" << options.functions;
  } else {
    out << "#include \"cuda/device/no_functions.cuh\"\n";
  }
  out << "#include \"cuda/" << family << "/" << pass_name(pass) << ".cu\"\n";
  return out.str();
}

std::string sources_key() { return sources().key; }

namespace {

// Kept for good: threads may end after the destructors of static objects have begun.
struct Loading {
  std::mutex mutex;
  std::map<std::string, std::shared_future<Loaded>> all;
  std::counting_semaphore<> cores{std::max<int>(1, std::thread::hardware_concurrency())};
};
Loading& loading() {
  static Loading& kept = *new Loading;
  return kept;
}

// As many threads hold one as there are cores: each compiler takes one, and hundreds of MB.
struct Core {
  Core() { loading().cores.acquire(); }
  ~Core() { loading().cores.release(); }
};

std::string key_of(const Variant& variant) { return settings().source_dir + "/" + variant.name(); }

// Loaded by the first thread that waits for it, or with `policy` async by a new one.
std::shared_future<Loaded> future_of(const Variant& variant, std::launch policy) {
  Loading& state = loading();
  const std::string key = key_of(variant);
  std::lock_guard<std::mutex> lock(state.mutex);
  auto found = state.all.find(key);
  if (found != state.all.end()) return found->second;
  auto task = [variant, policy] {
    std::optional<Core> core;
    if (policy == std::launch::async) core.emplace();
    return load(variant);
  };
  return state.all.emplace(key, std::async(policy, std::move(task)).share()).first->second;
}

}  // namespace

void begin_to_load(const Variant& variant) { future_of(variant, std::launch::async); }

void finish_loading() {
  Loading& state = loading();
  std::vector<std::shared_future<Loaded>> futures;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    for (const auto& [key, future] : state.all) futures.push_back(future);
  }
  for (const auto& future : futures) {  // but not for deferred ones, which wait() would load
    if (future.wait_for(std::chrono::seconds(0)) == std::future_status::timeout) future.wait();
  }
}

Loaded kernels_of(const Variant& variant, int device) {
  static std::mutex mutex;
  static std::set<std::pair<CuKernel, int>> ready;
  Loaded loaded;
  try {
    loaded = future_of(variant, std::launch::deferred).get();
  } catch (...) {
    // The next call may find what this one missed.
    std::lock_guard<std::mutex> lock(loading().mutex);
    loading().all.erase(key_of(variant));
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (!ready.count({loaded.main, device})) {
    const Driver& driver = Driver::get();
    driver.ready(loaded.main, device, loaded.traits.shared_bytes + loaded.traits.cluster_bytes);
    if (loaded.zero_dq) driver.ready(loaded.zero_dq, device, 0);
    if (loaded.convert_dq) driver.ready(loaded.convert_dq, device, 0);
    if (loaded.sum_slopes) driver.ready(loaded.sum_slopes, device, 0);
    if (loaded.sum_splits) driver.ready(loaded.sum_splits, device, 0);
    if (loaded.combine) driver.ready(loaded.combine, device, 0);
    if (loaded.row_sizes) driver.ready(loaded.row_sizes, device, loaded.traits.shared_bytes);
    if (loaded.float32) driver.ready(loaded.float32, device, kFloat32SharedBytes);
    if (loaded.float32_bias) driver.ready(loaded.float32_bias, device, kFloat32SharedBytes);
    ready.insert({loaded.main, device});  // only now: a call that failed here is tried again
  }
  return loaded;
}

Kernel build(const Variant& variant, const std::string& out_dir) {
  const Nvrtc::Result compiled = compile(variant, nvrtc_for(variant.arch));
  const KernelTraits traits = traits_of(Elf(compiled.cubin), variant.pass);
  const std::string entry = entry_point(variant.pass);
  Kernel kernel{};
  kernel.name = variant.name();
  kernel.pass = pass_name(variant.pass);
  kernel.head_dim = variant.head_dim;
  kernel.value_head_dim = variant.value_head_dim;
  kernel.block_q = variant.tile.block_q;
  kernel.block_kv = variant.tile.block_kv;
  kernel.registers = log_number(compiled.log, entry, " registers");
  kernel.shared_bytes = traits.shared_bytes;
  kernel.threads = traits.threads;
  kernel.spill_bytes =
      log_number(compiled.log, entry, "bytes spill stores") + log_number(compiled.log, entry, "bytes spill loads");
  kernel.local_bytes = log_number(compiled.log, entry, "bytes stack frame");
  kernel.cubin_bytes = static_cast<int64_t>(compiled.cubin.size());
  kernel.compiler_warnings = compiler_warnings_of(compiled.log);
  for (const char* beside : {float32_entry(variant), has_float32_bias(variant) ? kFloat32Bias : nullptr}) {
    if (!beside) continue;
    kernel.float32_registers = std::max(kernel.float32_registers, log_number(compiled.log, beside, " registers"));
    for (const char* what : {"bytes spill stores", "bytes spill loads", "bytes stack frame"}) {
      kernel.float32_local_bytes += log_number(compiled.log, beside, what);
    }
  }

  const auto path = KernelFolder::trusted(out_dir, true).write(kernel.name, source_key(variant), compiled.cubin);
  if (!path) throw std::runtime_error("can't write kernel " + kernel.name + " into " + out_dir);
  kernel.path = *path;
  return kernel;
}

}  // namespace jax_flash::cuda
