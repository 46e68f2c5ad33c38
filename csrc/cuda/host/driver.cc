#include "cuda/host/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace jax_flash::cuda {
namespace {

template <typename Function>
void bind(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("it lacks ") + name);
}

// dlerror() may return null.
std::string loader_error() {
  const char* error = dlerror();
  return error ? error : "unknown error of the loader";
}

}  // namespace

// Values of the driver's enumerations, which are part of its ABI.
constexpr int kAttributeMajor = 75;            // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kAttributeMinor = 76;            // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
constexpr int kAttributeMultiprocessors = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kMaxDynamicSharedBytes = 8;      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kMapUint16 = 1;                  // CU_TENSOR_MAP_DATA_TYPE_UINT16: copies the bits of any 16-bit type
constexpr int kMapNoInterleave = 0;            // CU_TENSOR_MAP_INTERLEAVE_NONE
constexpr int kMapSwizzle128Bytes = 3;         // CU_TENSOR_MAP_SWIZZLE_128B
constexpr int kMapPromote128Bytes = 2;         // CU_TENSOR_MAP_L2_PROMOTION_L2_128B
constexpr int kMapZeroFill = 0;                // CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: zeros

constexpr int kLaunchCluster = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kLaunchOverlap = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  alignas(8) unsigned value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  CuStream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver::Functions {
  int (*init)(unsigned);
  int (*get_error_name)(int, const char**);
  int (*driver_get_version)(int*);
  int (*device_get_count)(int*);
  int (*device_get)(int*, int);
  int (*device_get_name)(char*, int, int);
  int (*device_get_attribute)(int*, int, int);
  int (*primary_context_retain)(CuContext*, int);
  int (*primary_context_release)(int);
  int (*context_push)(CuContext);
  int (*context_pop)(CuContext*);
  int (*library_load_data)(CuLibrary*, const void*, void*, void**, unsigned, void*, void**, unsigned);
  int (*library_get_kernel)(CuKernel*, CuLibrary, const char*);
  int (*kernel_get_function)(CuFunction*, CuKernel);
  int (*kernel_set_attribute)(int, int, CuKernel, int);
  int (*launch_kernel)(CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CuStream,
                       void**, void**);
  int (*launch_kernel_ex)(const LaunchConfig*, CuFunction, void**, void**);
  int (*memset_d32_async)(unsigned long long, unsigned, size_t, CuStream);
  int (*stream_is_capturing)(CuStream, int*);
  int (*tensor_map_encode_tiled)(TensorMap*, int, unsigned, void*, const unsigned long long*, const unsigned long long*,
                                 const unsigned*, const unsigned*, int, int, int, int);
};

Driver::Driver() {
  static Functions functions;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error("the CUDA driver can't be opened: " + loader_error());
  Functions& f = functions;
  f_ = &f;
  try {
    bind(library, "cuInit", f.init);
    bind(library, "cuGetErrorName", f.get_error_name);
    bind(library, "cuDriverGetVersion", f.driver_get_version);
    bind(library, "cuDeviceGetCount", f.device_get_count);
    bind(library, "cuDeviceGet", f.device_get);
    bind(library, "cuDeviceGetName", f.device_get_name);
    bind(library, "cuDeviceGetAttribute", f.device_get_attribute);
    bind(library, "cuDevicePrimaryCtxRetain", f.primary_context_retain);
    bind(library, "cuDevicePrimaryCtxRelease_v2", f.primary_context_release);
    bind(library, "cuCtxPushCurrent_v2", f.context_push);
    bind(library, "cuCtxPopCurrent_v2", f.context_pop);
    bind(library, "cuLibraryLoadData", f.library_load_data);
    bind(library, "cuLibraryGetKernel", f.library_get_kernel);
    bind(library, "cuKernelGetFunction", f.kernel_get_function);
    bind(library, "cuKernelSetAttribute", f.kernel_set_attribute);
    bind(library, "cuLaunchKernel", f.launch_kernel);
    bind(library, "cuLaunchKernelEx", f.launch_kernel_ex);
    bind(library, "cuMemsetD32Async", f.memset_d32_async);
    bind(library, "cuStreamIsCapturing", f.stream_is_capturing);
    bind(library, "cuTensorMapEncodeTiled", f.tensor_map_encode_tiled);
  } catch (const std::runtime_error& e) {
    throw std::runtime_error(std::string("the CUDA driver is older than 12.0: ") + e.what());
  }
  check(f.init(0), "cuInit");
}

const Driver& Driver::get() {
  static const Driver driver;  // a constructor that throws is tried again by the next call
  return driver;
}

void Driver::check(int result, const char* what) const {
  if (result == 0) return;
  const char* name = nullptr;
  f_->get_error_name(result, &name);
  throw std::runtime_error(std::string(what) + " failed: " + (name ? name : "error " + std::to_string(result)));
}

int Driver::version() const {
  int version = 0;
  check(f_->driver_get_version(&version), "cuDriverGetVersion");
  return version;
}

int Driver::device_count() const {
  int count = 0;
  check(f_->device_get_count(&count), "cuDeviceGetCount");
  return count;
}

std::string Driver::device_name(int device) const {
  char name[256] = {};
  check(f_->device_get_name(name, sizeof(name) - 1, device), "cuDeviceGetName");
  return name;
}

int Driver::compute_capability(int device) const {
  int handle = 0, major = 0, minor = 0;
  check(f_->device_get(&handle, device), "cuDeviceGet");
  check(f_->device_get_attribute(&major, kAttributeMajor, handle), "cuDeviceGetAttribute");
  check(f_->device_get_attribute(&minor, kAttributeMinor, handle), "cuDeviceGetAttribute");
  return 10 * major + minor;
}

int Driver::multiprocessors(int device) const {
  int handle = 0, count = 0;
  check(f_->device_get(&handle, device), "cuDeviceGet");
  check(f_->device_get_attribute(&count, kAttributeMultiprocessors, handle), "cuDeviceGetAttribute");
  return count;
}

CuLibrary Driver::load(const std::string& cubin) const {
  CuLibrary library = nullptr;
  check(f_->library_load_data(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  return library;
}

CuKernel Driver::kernel(CuLibrary library, const char* name) const {
  CuKernel kernel = nullptr;
  check(f_->library_get_kernel(&kernel, library, name), "cuLibraryGetKernel");
  return kernel;
}

void Driver::ready(CuKernel kernel, int device, int shared_bytes) const {
  int handle = 0;
  check(f_->device_get(&handle, device), "cuDeviceGet");
  CuContext context = nullptr;
  check(f_->primary_context_retain(&context, handle), "cuDevicePrimaryCtxRetain");
  int result = f_->context_push(context);
  if (result == 0) {
    CuFunction function = nullptr;
    result = f_->kernel_set_attribute(kMaxDynamicSharedBytes, shared_bytes, kernel, handle);
    if (result == 0) result = f_->kernel_get_function(&function, kernel);
    f_->context_pop(&context);
  }
  f_->primary_context_release(handle);
  check(result, "making a kernel ready");
}

void Driver::launch(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, CuStream stream,
                    const void* const* arguments) const {
  // The driver accepts a context-independent kernel (CUkernel) wherever it takes a CUfunction.
  check(f_->launch_kernel(reinterpret_cast<CuFunction>(kernel), blocks, 1, 1, threads, 1, 1, shared_bytes, stream,
                          const_cast<void**>(arguments), nullptr),
        "cuLaunchKernel");
}

void Driver::launch_small(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, CuStream stream,
                          const void* const* arguments, unsigned cluster) const {
  LaunchAttribute attributes[] = {{kLaunchOverlap, {1}}, {kLaunchCluster, {cluster, 1, 1}}};
  const LaunchConfig config{{blocks, 1, 1}, {threads, 1, 1}, shared_bytes, stream, attributes, cluster > 1 ? 2u : 1u};
  check(f_->launch_kernel_ex(&config, reinterpret_cast<CuFunction>(kernel), const_cast<void**>(arguments), nullptr),
        "cuLaunchKernelEx");
}

TensorMap Driver::tensor_map(void* data, const unsigned long long (&sizes)[4], const unsigned long long (&strides)[3],
                             const unsigned (&box)[4]) const {
  static constexpr unsigned kEveryElement[4] = {1, 1, 1, 1};
  TensorMap map;
  check(f_->tensor_map_encode_tiled(&map, kMapUint16, 4, data, sizes, strides, box, kEveryElement, kMapNoInterleave,
                                    kMapSwizzle128Bytes, kMapPromote128Bytes, kMapZeroFill),
        "cuTensorMapEncodeTiled");
  return map;
}

void Driver::zero(void* floats, size_t count, CuStream stream) const {
  check(f_->memset_d32_async(reinterpret_cast<unsigned long long>(floats), 0, count, stream), "cuMemsetD32Async");
}

bool Driver::capturing(CuStream stream) const {
  int status = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  check(f_->stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

using NvrtcProgram = struct _nvrtcProgram*;

struct Nvrtc::Functions {
  const char* (*get_error_string)(int);
  int (*version)(int*, int*);
  int (*get_num_supported_archs)(int*);
  int (*get_supported_archs)(int*);
  int (*create_program)(NvrtcProgram*, const char*, const char*, int, const char* const*, const char* const*);
  int (*destroy_program)(NvrtcProgram*);
  int (*compile_program)(NvrtcProgram, int, const char* const*);
  int (*get_program_log_size)(NvrtcProgram, size_t*);
  int (*get_program_log)(NvrtcProgram, char*);
  int (*get_cubin_size)(NvrtcProgram, size_t*);
  int (*get_cubin)(NvrtcProgram, char*);
};

std::vector<Nvrtc> Nvrtc::all(const std::vector<std::string>& paths, std::string* error) {
  static std::mutex mutex;
  static std::map<std::vector<std::string>, std::vector<Nvrtc>> known;
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<Nvrtc>& found = known[paths];
  if (error) error->clear();
  if (!found.empty()) return found;
  std::vector<std::string> names = paths;
  names.insert(names.end(), {"libnvrtc.so.13", "libnvrtc.so.12"});
  std::string failures;
  for (const std::string& name : names) {
    try {
      Nvrtc nvrtc(name);
      const bool again = std::any_of(found.begin(), found.end(),
                                     [&](const Nvrtc& other) { return other.version() == nvrtc.version(); });
      if (!again) found.push_back(std::move(nvrtc));
    } catch (const std::runtime_error& e) {
      failures += (failures.empty() ? "" : "; ") + std::string(e.what());
    }
  }
  if (error && found.empty()) *error = failures;
  return found;
}

Nvrtc::Nvrtc(const std::string& name) : path_(name) {
  // NVRTC opens its builtins by name when it compiles, and finds those in its own folder only if they are loaded
  // already.
  const size_t stem = name.rfind("libnvrtc.so.");
  if (size_t slash = name.rfind('/'); slash != std::string::npos && stem != std::string::npos) {
    for (int minor = 9; minor >= 0; --minor) {
      std::string builtins =
          name.substr(0, slash) + "/libnvrtc-builtins.so." + name.substr(stem + 12) + "." + std::to_string(minor);
      if (dlopen(builtins.c_str(), RTLD_NOW | RTLD_GLOBAL)) break;
    }
  }
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(loader_error());
  auto f = std::make_unique<Functions>();
  f_ = f.get();
  try {
    bind(library, "nvrtcGetErrorString", f->get_error_string);
    bind(library, "nvrtcVersion", f->version);
    bind(library, "nvrtcGetNumSupportedArchs", f->get_num_supported_archs);
    bind(library, "nvrtcGetSupportedArchs", f->get_supported_archs);
    bind(library, "nvrtcCreateProgram", f->create_program);
    bind(library, "nvrtcDestroyProgram", f->destroy_program);
    bind(library, "nvrtcCompileProgram", f->compile_program);
    bind(library, "nvrtcGetProgramLogSize", f->get_program_log_size);
    bind(library, "nvrtcGetProgramLog", f->get_program_log);
    bind(library, "nvrtcGetCUBINSize", f->get_cubin_size);
    bind(library, "nvrtcGetCUBIN", f->get_cubin);
    check(f->version(&major_, &minor_), "nvrtcVersion");
    int count = 0;
    check(f->get_num_supported_archs(&count), "nvrtcGetNumSupportedArchs");
    archs_.resize(count);
    check(f->get_supported_archs(archs_.data()), "nvrtcGetSupportedArchs");
  } catch (const std::runtime_error& e) {
    throw std::runtime_error(name + ": " + e.what());
  }
  f.release();  // intentionally leaked: the library is never closed
}

void Nvrtc::check(int result, const char* what) const {
  if (result) throw std::runtime_error(std::string(what) + " failed: " + f_->get_error_string(result));
}

int Nvrtc::target(int arch) const {
  int best = 0;
  for (int known : archs_) {
    if (known / 10 == arch / 10 && known <= arch) best = std::max(best, known);
  }
  return best;
}

Nvrtc::Result Nvrtc::compile(const std::string& name, const std::string& source, const std::vector<Header>& headers,
                             const std::vector<std::string>& options) const {
  std::vector<const char*> names, texts, flags;
  for (const Header& header : headers) {
    names.push_back(header.name.c_str());
    texts.push_back(header.text.c_str());
  }
  for (const std::string& option : options) flags.push_back(option.c_str());

  struct Program {
    const Functions* f;
    NvrtcProgram handle = nullptr;
    ~Program() {
      if (handle) f->destroy_program(&handle);
    }
  } program{f_};
  check(f_->create_program(&program.handle, source.c_str(), (name + ".cu").c_str(), static_cast<int>(headers.size()),
                           texts.data(), names.data()),
        "nvrtcCreateProgram");
  int compiled = f_->compile_program(program.handle, static_cast<int>(flags.size()), flags.data());

  Result result;
  size_t size = 0;
  check(f_->get_program_log_size(program.handle, &size), "nvrtcGetProgramLogSize");
  result.log.resize(size);
  check(f_->get_program_log(program.handle, result.log.data()), "nvrtcGetProgramLog");
  result.log.resize(result.log.find('\0') == std::string::npos ? size : result.log.find('\0'));
  if (compiled) {
    throw std::runtime_error("NVRTC " + version() + " (" + path_ + ") can't compile kernel " + name + ": " +
                             f_->get_error_string(compiled) + "\n" + result.log);
  }
  check(f_->get_cubin_size(program.handle, &size), "nvrtcGetCUBINSize");
  result.cubin.resize(size);
  check(f_->get_cubin(program.handle, result.cubin.data()), "nvrtcGetCUBIN");
  return result;
}

}  // namespace jax_flash::cuda
