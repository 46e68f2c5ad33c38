// The driver and the interface of jit for kernels that run in the emulator, below the real launch.cc: kernels are
// compiled by the host's compiler. And what Python calls.
#include "runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

#include "cuda/host/cuda.h"
#include "cuda/host/driver.h"
#include "cuda/host/jit.h"

using namespace jax_flash;
using namespace jax_flash::cuda;

namespace {

std::string compile_command;  // makes its second argument of its first
std::string folder;
int the_multiprocessors = 1;
unsigned the_seed = 0;

// What a CuKernel points to here: all but one are null.
struct Emulated {
  void (*of_maps)(const Problem&, const TensorMaps&);
  void (*of_problem)(const Problem&);
  void (*of_scaling)(const Scaling&);
  bool in_order = false;  // whether blocks wait for those that start before them
};

}  // namespace

namespace jax_flash::cuda {

Driver::Driver() : f_(nullptr) {}
const Driver& Driver::get() {
  static const Driver driver;
  return driver;
}
int Driver::version() const { return 12000; }
// Device 0 is a Hopper, device 1 an A100.
int Driver::device_count() const { return 2; }
std::string Driver::device_name(int) const { return "emulator"; }
int Driver::compute_capability(int device) const { return device == 0 ? 90 : 80; }
int Driver::multiprocessors(int) const { return the_multiprocessors; }
CuLibrary Driver::load(const std::string&) const { throw std::logic_error("the emulator loads no cubins"); }
CuKernel Driver::kernel(CuLibrary, const char*) const { throw std::logic_error("the emulator loads no cubins"); }
void Driver::ready(CuKernel, int, int) const {}
bool Driver::capturing(CuStream) const { return false; }

void Driver::launch(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, CuStream,
                    const void* const* arguments) const {
  const Emulated& emulated = *reinterpret_cast<const Emulated*>(kernel);
  const auto body = [&] {
    if (emulated.of_scaling) return emulated.of_scaling(*static_cast<const Scaling*>(arguments[0]));
    const Problem& problem = *static_cast<const Problem*>(arguments[0]);
    if (emulated.of_problem) return emulated.of_problem(problem);
    emulated.of_maps(problem, *static_cast<const TensorMaps*>(arguments[1]));
  };
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned block = the_seed % 2 && !emulated.in_order ? blocks - 1 - i : i;
    const std::string error = emulator::run_block(block, blocks, threads, shared_bytes, the_seed, body);
    if (!error.empty()) throw std::runtime_error(error);
  }
}

// Kernels run one after the other here, so that there is nothing to wait for.
void Driver::launch_small(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, CuStream stream,
                          const void* const* arguments, unsigned cluster) const {
  if (cluster > 1) throw std::logic_error("the emulator has no clusters");
  launch(kernel, blocks, threads, shared_bytes, stream, arguments);
}

void Driver::zero(void* floats, size_t count, CuStream) const { std::memset(floats, 0, 4 * count); }

TensorMap Driver::tensor_map(void* data, const unsigned long long (&sizes)[4], const unsigned long long (&strides)[3],
                             const unsigned (&box)[4]) const {
  emulator::Map map{emulator::Map::kMark, data, {}, {}, {}};
  std::copy_n(sizes, 4, map.sizes);
  std::copy_n(strides, 3, map.strides);
  std::copy_n(box, 4, map.box);
  // What the driver refuses.
  bool good = reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] == 64 && box[1] >= 1 && box[1] <= 256 &&
              box[2] == 1 && box[3] == 1;
  for (unsigned long long size : sizes) good = good && size >= 1 && size <= 1ull << 32;
  for (unsigned long long stride : strides) good = good && stride % 16 == 0 && stride < 1ull << 40;
  if (!good) throw std::runtime_error("cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE");
  TensorMap encoded{};
  std::memcpy(&encoded, &map, sizeof(map));
  return encoded;
}

Loaded kernels_of(const Variant& variant, int) {
  const std::string name = variant.name();  // asked for once: launch.cc remembers
  const bool has_maps = variant.family == "sm90a", scales = variant.pass == Pass::scale;
  if (!has_maps && variant.family != "sm80") throw std::runtime_error("the emulator has no " + name);
  const std::string entry = entry_point(variant.pass), base = folder + "/" + name;
  {
    std::ofstream file(base + ".cc");
    file << variant.source() << "namespace jax_flash {\n"
         << "extern \"C\" KernelTraits emulated_traits() { return " << entry << "_traits; }\n";
    if (scales) {
      file << "extern \"C\" void emulated_main(const Scaling& scaling) { jax_flash_scale(scaling); }\n"
           << "extern \"C\" void emulated_row_sizes(const Scaling& scaling) { " << kRowSizes << "(scaling); }\n";
    } else {
      file << "extern \"C\" void emulated_main(const Problem& problem"
           << (has_maps ? ", const TensorMaps& maps) { " : ") { ") << entry
           << (has_maps ? "(problem, maps); }\n" : "(problem); }\n");
    }
    if (variant.pass == Pass::forward_split_kv) {
      file << "extern \"C\" void emulated_combine(const Problem& problem) { jax_flash_combine(problem); }\n";
    }
    if (variant.pass == Pass::backward) {
      file << "extern \"C\" void emulated_sum_splits(const Problem& problem) { jax_flash_sum_splits(problem); }\n";
      file << "extern \"C\" void emulated_sum_slopes(const Problem& problem) { jax_flash_sum_slopes(problem); }\n";
    }
    if (variant.pass == Pass::backward && !variant.options.separate_dq) {
      file << "extern \"C\" void emulated_convert_dq(const Problem& problem) { jax_flash_convert_dq(problem); }\n";
      if (has_maps) {
        file << "extern \"C\" void emulated_zero_dq(const Problem& problem) { jax_flash_zero_dq(problem); }\n";
      }
    }
    if (const char* beside = float32_entry(variant)) {
      file << "extern \"C\" void emulated_float32(const Problem& problem) { " << beside << "(problem); }\n";
    }
    if (has_float32_bias(variant)) {
      file << "extern \"C\" void emulated_float32_bias(const Problem& problem) { " << kFloat32Bias << "(problem); }\n";
    }
    file << "}  // namespace jax_flash\n";
  }
  const std::string command = compile_command + " " + base + ".cc " + base + ".so";
  if (std::system(command.c_str()) != 0) throw std::runtime_error("can't compile " + base + ".cc");
  void* library = dlopen((base + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(dlerror());
  Loaded loaded{};
  loaded.traits = reinterpret_cast<KernelTraits (*)()>(dlsym(library, "emulated_traits"))();
  auto kernel = [&](const char* maps, const char* problem) {
    return reinterpret_cast<CuKernel>(new Emulated{
        reinterpret_cast<decltype(Emulated::of_maps)>(maps ? dlsym(library, maps) : nullptr),
        reinterpret_cast<decltype(Emulated::of_problem)>(problem ? dlsym(library, problem) : nullptr), nullptr});
  };
  if (scales) {
    auto of_scaling = [&](const char* name) {
      auto found = reinterpret_cast<decltype(Emulated::of_scaling)>(dlsym(library, name));
      return reinterpret_cast<CuKernel>(new Emulated{nullptr, nullptr, found});
    };
    loaded.main = of_scaling("emulated_main");
    loaded.row_sizes = of_scaling("emulated_row_sizes");
    return loaded;
  }
  loaded.main = has_maps ? kernel("emulated_main", nullptr) : kernel(nullptr, "emulated_main");
  reinterpret_cast<Emulated*>(loaded.main)->in_order = loaded.traits.converts_ahead;
  if (loaded.traits.combine_warps) loaded.combine = kernel(nullptr, "emulated_combine");
  if (loaded.traits.splits_groups) loaded.sum_splits = kernel(nullptr, "emulated_sum_splits");
  if (loaded.traits.zero_threads) loaded.zero_dq = kernel(nullptr, "emulated_zero_dq");
  if (loaded.traits.convert_warps) loaded.convert_dq = kernel(nullptr, "emulated_convert_dq");
  if (variant.pass == Pass::backward && variant.options.has_dalibi_slopes) {
    loaded.sum_slopes = kernel(nullptr, "emulated_sum_slopes");
  }
  if (float32_entry(variant)) loaded.float32 = kernel(nullptr, "emulated_float32");
  if (has_float32_bias(variant)) loaded.float32_bias = kernel(nullptr, "emulated_float32_bias");
  return loaded;
}

}  // namespace jax_flash::cuda

// What Python calls. A call is made of names and numbers, and run as often as one likes.

namespace {

struct Call {
  Problem problem{};
  long long scratch_elements = 0;
  DType dtype = DType::f16;
  int device = 0;
  std::string error;
};

Tensor* tensor_of(Problem& p, const std::string& name) {
  if (name == "q") return &p.q;
  if (name == "k") return &p.k;
  if (name == "v") return &p.v;
  if (name == "out") return &p.out;
  if (name == "dout") return &p.dout;
  if (name == "dq") return &p.dq;
  if (name == "dk") return &p.dk;
  if (name == "dv") return &p.dv;
  return nullptr;
}

}  // namespace

#define EMULATOR_CALL extern "C" __attribute__((visibility("default")))

EMULATOR_CALL void emulator_configure(const char* command, const char* to, int multiprocessors) {
  compile_command = command;
  folder = to;
  the_multiprocessors = multiprocessors;
}

EMULATOR_CALL void emulator_forget() { emulator::forget(); }
EMULATOR_CALL const char* emulator_waits() {
  static std::string text;
  text = emulator::waits();
  return text.c_str();
}
EMULATOR_CALL void emulator_omit(const char* wait) { emulator::omit(wait); }

EMULATOR_CALL Call* call_new(int bf16, int device) {
  Call* call = new Call;
  call->device = device;
  call->dtype = bf16 ? DType::bf16 : DType::f16;
  call->problem.options.sequences = 1;
  return call;
}
// The source of score and mask functions.
EMULATOR_CALL void call_functions(Call* call, const char* text) {
  static std::map<std::string, int> all;
  call->problem.options.functions = all.emplace(text, 0).first->first.c_str();
}
EMULATOR_CALL void call_delete(Call* call) { delete call; }

// Sizes, and options that are numbers; 0 when there is none of that name.
EMULATOR_CALL int call_number(Call* call, const char* name_, double value) {
  const std::string name = name_;
  Problem& p = call->problem;
  for (auto [known, field] :
       std::initializer_list<std::pair<const char*, int*>>{{"batch", &p.batch},
                                                           {"q_length", &p.q_length},
                                                           {"kv_length", &p.kv_length},
                                                           {"q_heads", &p.q_heads},
                                                           {"kv_heads", &p.kv_heads},
                                                           {"head_dim", &p.head_dim},
                                                           {"value_head_dim", &p.value_head_dim}}) {
    if (name == known) return *field = static_cast<int>(value), 1;
  }
  if (name == "scale") p.scale = static_cast<float>(value);
#define SET(type, option) \
  if (name == #option) return p.options.option = static_cast<type>(value), 1;
#define SET_FEATURE(type, option, absent) SET(type, option)
#define NOTHING(type, option, dims)
  JAX_FLASH_OPTIONS(SET, SET, SET_FEATURE, NOTHING, NOTHING)
#undef NOTHING
#undef SET_FEATURE
#undef SET
  return 0;
}

// Arrays, with their strides in elements: of [B, L, N, H] the first three, of bias and mask all four.
EMULATOR_CALL int call_array(Call* call, const char* name_, void* data, const long long* strides) {
  const std::string name = name_;
  Problem& p = call->problem;
  if (Tensor* tensor = tensor_of(p, name)) return *tensor = {data, strides[0], strides[1], strides[2]}, 1;
  const Strides all = strides ? Strides{strides[0], strides[1], strides[2], strides[3]} : Strides{};
  if (name == "bias") p.bias_strides = all;
  if (name == "dbias") p.dbias_strides = all;
  if (name == "mask") p.mask_strides = all;
  if (name == "mask_blocks") p.mask_blocks_strides = {strides[0], strides[1], strides[2], strides[3], strides[4]};
  if (name.starts_with("captured_")) return p.captured[std::stoi(name.substr(9))] = data, 1;
  if (name.starts_with("dcaptured_")) {
    const int i = std::stoi(name.substr(10));
    p.options.dcaptured = std::max(p.options.dcaptured, i + 1);
    return p.dcaptured[i] = data, p.dcaptured_elements[i] = strides[0], 1;
  }
  if (name == "kv_intervals") p.kv_intervals_strides = all;
  if (name == "q_intervals") p.q_intervals_strides = all;
  if (name == "kv_interval_ranges") p.kv_interval_ranges_strides = all;
  if (name == "q_interval_ranges") p.q_interval_ranges_strides = all;
  if (name == "lse") return p.lse = data, 1;
  if (name == "delta") return p.delta = data, 1;
  if (name == "scratch") return p.scratch = data, 1;
#define NOTHING(type, option)
#define NO_FEATURE(type, option, absent)
#define SET(type, option, dims) \
  if (name == #option) return p.option = static_cast<const type*>(data), p.options.has_##option = data != nullptr, 1;
#define SETS(type, option, dims) \
  SET(type, option, dims)        \
  if (name == "d" #option) return p.d##option = data, p.options.has_d##option = data != nullptr, 1;
  JAX_FLASH_OPTIONS(NOTHING, NOTHING, NO_FEATURE, SET, SETS)
#undef SETS
#undef SET
#undef NO_FEATURE
#undef NOTHING
  return 0;
}

EMULATOR_CALL long long call_scratch(Call* call, int backward) {
  return backward ? backward_scratch(call->dtype, call->problem) : forward_scratch(call->dtype, call->problem);
}
EMULATOR_CALL void call_scratch_elements(Call* call, long long elements) { call->scratch_elements = elements; }

namespace {

const char* guarded(Call* call, const std::function<void()>& body) {
  call->error.clear();
  try {
    body();
  } catch (const std::exception& e) {
    call->error = e.what();
  }
  return call->error.c_str();
}

}  // namespace

// Both return what is wrong, or an empty text. Several threads may prepare at the same time.
EMULATOR_CALL const char* call_prepare(Call* call, int backward) {
  return guarded(call, [&] {
    prepare(call->device, backward ? Pass::backward : Pass::forward, call->dtype, call->problem,
            call->scratch_elements);
  });
}
EMULATOR_CALL const char* call_run(Call* call, int backward, unsigned seed) {
  the_seed = seed;
  return guarded(call, [&] {
    launch(call->device, nullptr, backward ? Pass::backward : Pass::forward, call->dtype, call->problem,
           call->scratch_elements);
  });
}

// The float16 arrays of float32 or bfloat16 ones; returns what is wrong, or an empty text.
EMULATOR_CALL const char* scale_run(Call* call, int two_limbs, int bf16, const Scaling* scaling, unsigned seed) {
  the_seed = seed;
  return guarded(call, [&] { launch_scale(call->device, nullptr, two_limbs, bf16, *scaling); });
}

namespace {

struct EmulatedStudy {
  void (*kernel)(const Study&);
  int shared_bytes;
};

EmulatedStudy study_kernel(const std::string& file, const std::string& entry, const std::string& constants) {
  static std::map<std::string, EmulatedStudy> all;
  EmulatedStudy& found = all[file + entry + constants];
  if (found.kernel) return found;
  const std::string base = folder + "/study-" + file + "-" + entry + "-" + std::to_string(all.size());
  std::ofstream(base + ".cc") << "#include \"problem.h\"\nnamespace jax_flash {\n"
                              << constants << "}\n#include \"cuda/study/" << file << ".cu\"\n"
                              << "extern \"C\" void emulated(const jax_flash::Study& p) { jax_flash::" << entry
                              << "(p); }\nextern \"C\" int emulated_bytes() { return jax_flash::shared_bytes; }\n";
  const std::string command = compile_command + " " + base + ".cc " + base + ".so";
  if (std::system(command.c_str()) != 0) throw std::runtime_error("can't compile " + base + ".cc");
  void* library = dlopen((base + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(dlerror());
  found = {reinterpret_cast<void (*)(const Study&)>(dlsym(library, "emulated")),
           reinterpret_cast<int (*)()>(dlsym(library, "emulated_bytes"))()};
  return found;
}

}  // namespace

// A study kernel; returns what is wrong, or an empty text.
EMULATOR_CALL const char* study_run(Call* call, const char* file, const char* entry, const char* constants, int blocks,
                                    const Study* study, unsigned seed) {
  return guarded(call, [&] {
    const EmulatedStudy found = study_kernel(file, entry, constants);
    for (int i = 0; i < blocks; ++i) {
      const int block = seed % 2 ? blocks - 1 - i : i;
      const std::string error =
          emulator::run_block(block, blocks, kStudyThreads, found.shared_bytes, seed, [&] { found.kernel(*study); });
      if (!error.empty()) throw std::runtime_error(error);
    }
  });
}
