// The CUDA driver and NVRTC, opened when first needed: importing the package must work where neither is installed.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cuda/tensor_maps.h"

namespace jax_flash::cuda {

// The driver's opaque handles.
using CuLibrary = struct CUlib_st*;
using CuKernel = struct CUkern_st*;
using CuFunction = struct CUfunc_st*;
using CuContext = struct CUctx_st*;
using CuStream = struct CUstream_st*;

// Methods throw std::runtime_error with the driver's own error name.
class Driver {
 public:
  // The driver of this process; throws if there is none.
  static const Driver& get();

  int version() const;  // 13000 for 13.0
  int device_count() const;
  std::string device_name(int device) const;
  int compute_capability(int device) const;  // 90 for 9.0
  int multiprocessors(int device) const;

  CuLibrary load(const std::string& cubin) const;
  CuKernel kernel(CuLibrary library, const char* name) const;
  // Loads the kernel onto the device and allows it this much dynamic shared memory, before any launch or graph capture.
  void ready(CuKernel kernel, int device, int shared_bytes) const;
  // `arguments` has a pointer to each of the kernel's parameters.
  void launch(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, CuStream stream,
              const void* const* arguments) const;
  // The same with clusters of `cluster` blocks and programmatic launch, from compute capability 9.0 on: the kernel may
  // start before its predecessor in the stream has ended, and waits for that itself.
  void launch_small(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, CuStream stream,
                    const void* const* arguments, unsigned cluster) const;
  // The tensor map of a 4-dimensional array of 16-bit elements. Dimensions begin with the fastest one, which is
  // contiguous; the array is aligned to 16 bytes, and the strides of the other dimensions are multiples of 16 bytes.
  // For the box and the swizzle see TensorMaps.
  TensorMap tensor_map(void* data, const unsigned long long (&sizes)[4], const unsigned long long (&strides)[3],
                       const unsigned (&box)[4]) const;
  void zero(void* floats, size_t count, CuStream stream) const;
  bool capturing(CuStream stream) const;  // whether launches are captured into a graph

 private:
  Driver();
  void check(int result, const char* what) const;

  struct Functions;
  const Functions* f_;
};

// One NVRTC library.
class Nvrtc {
 public:
  // All NVRTC libraries that can be opened: `paths` first, then by the loader's own search. `error` says why there is
  // none. A result is cached for these paths, unless it is empty, since libraries may be loaded later.
  static std::vector<Nvrtc> all(const std::vector<std::string>& paths, std::string* error);

  struct Result {
    std::string cubin;
    std::string log;
  };
  struct Header {
    std::string name;
    std::string text;
  };
  // Throws std::runtime_error with the compiler's log.
  Result compile(const std::string& name, const std::string& source, const std::vector<Header>& headers,
                 const std::vector<std::string>& options) const;

  const std::string& path() const { return path_; }
  std::string version() const { return std::to_string(major_) + "." + std::to_string(minor_); }
  // The best target for a device of compute capability `arch`: itself, or an older one of the same major version, whose
  // cubins it runs; 0 if there is none.
  int target(int arch) const;

 private:
  explicit Nvrtc(const std::string& name);  // a path, or a name that the loader searches for; throws std::runtime_error
  void check(int result, const char* what) const;

  struct Functions;
  const Functions* f_;
  std::string path_;
  int major_ = 0, minor_ = 0;
  std::vector<int> archs_;
};

}  // namespace jax_flash::cuda
