// A CUDA driver that launches nothing: the functions that the library binds (csrc/cuda/host/driver.cc), and some for
// Python. A kernel is represented by its name. Every launch is recorded with the host's plan.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "problem.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

int capability = 90, multiprocessors = 132;
bool throws = false;
std::string launches;  // a line each

struct Kernel {
  char name[64];
};

// What of a call the host has planned.
std::string plan_of(const jax_flash::Problem& p) {
  char text[320];
  std::snprintf(
      text, sizeof(text),
      R"("kv_slices": %d, "scratch": %llu, "group_splits": %d, "sums_of_group": %d, "halved": %d, "downwards_from": %d, )"
      R"("downwards_group": %d, "group_sums": %llu, "q": %llu, "dq": %llu)",
      p.kv_slices, reinterpret_cast<unsigned long long>(p.scratch), p.group_splits, p.sums_of_group, p.halved,
      p.downwards_from, p.downwards_group, reinterpret_cast<unsigned long long>(p.group_sums),
      reinterpret_cast<unsigned long long>(p.q.data), reinterpret_cast<unsigned long long>(p.dq.data));
  return text;
}

int launch(const void* function, unsigned blocks, unsigned threads, unsigned cluster, void** arguments) {
  if (throws) throw 42;
  char line[256];
  std::snprintf(line, sizeof(line), R"({"kernel": "%s", "blocks": %u, "threads": %u, "cluster": %u, )",
                static_cast<const Kernel*>(function)->name, blocks, threads, cluster);
  launches += line + plan_of(*static_cast<const jax_flash::Problem*>(arguments[0])) + "}\n";
  return 0;
}

// CUlaunchConfig and CUlaunchAttribute.
struct Attribute {
  int id;
  alignas(8) unsigned value[16];
};
struct Config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};
constexpr int kCluster = 4;

}  // namespace

API void fake_set(int capability_, int multiprocessors_, int throws_) {
  capability = capability_;
  multiprocessors = multiprocessors_;
  throws = throws_ != 0;
}
// Since the last time.
API const char* fake_launches() {
  static std::string taken;
  taken.swap(launches);
  launches.clear();
  return taken.c_str();
}

// Of what a kernel of a graph is given.
API const char* fake_plan(const void* problem) {
  static std::string text;
  text = "{" + plan_of(*static_cast<const jax_flash::Problem*>(problem)) + "}";
  return text.c_str();
}

API int cuInit(unsigned) { return 0; }
API int cuGetExportTable(const void**, const void*) { return 500; }  // NVRTC asks for one; CUDA_ERROR_NOT_FOUND
API int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_FAKE", 0; }
API int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
API int cuDeviceGetCount(int* count) { return *count = 1, 0; }
API int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
API int cuDeviceGetName(char* name, int size, int) { return std::snprintf(name, size, "Fake GPU"), 0; }
API int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : multiprocessors;
  return 0;
}
API int cuDevicePrimaryCtxRetain(void** context, int) { return *context = nullptr, 0; }
API int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API int cuCtxPushCurrent_v2(void*) { return 0; }
API int cuCtxPopCurrent_v2(void**) { return 0; }
API int cuLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**, unsigned) {
  return *library = nullptr, 0;
}
API int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  auto* made = new Kernel{};
  std::strncpy(made->name, name, sizeof(made->name) - 1);
  return *kernel = made, 0;
}
API int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, 0; }
API int cuKernelSetAttribute(int, int, void*, int) { return 0; }
API int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                       unsigned, void*, void** arguments, void**) {
  return launch(function, blocks, threads, 1, arguments);
}
API int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void**) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id == kCluster) cluster = config->attributes[i].value[0];
  }
  return launch(function, config->grid[0], config->block[0], cluster, arguments);
}
API int cuMemsetD32Async(unsigned long long to, unsigned, size_t count, void*) {
  char line[128];
  std::snprintf(line, sizeof(line), R"({"kernel": "memset", "to": %llu, "count": %zu})", to, count);
  launches += std::string(line) + "\n";
  return 0;
}
API int cuStreamIsCapturing(void*, int* status) { return *status = 0, 0; }
// The map is where its array is and the rows of its box.
API int cuTensorMapEncodeTiled(unsigned long long* map, int, unsigned, void* data, const unsigned long long*,
                               const unsigned long long*, const unsigned* box, const unsigned*, int, int, int, int) {
  std::memset(map, 0, 128);
  map[0] = reinterpret_cast<unsigned long long>(data);
  map[1] = box[1];
  return 0;
}
