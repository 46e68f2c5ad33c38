// The CUDA driver and NVRTC, opened when first needed: importing the package must work where neither is installed.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cuda/tensor_maps.h"

namespace jax_flash::cuda {

// The driver's handles, as opaque as its own header has them.
using CuLibrary = struct CUlib_st*;
using CuKernel = struct CUkern_st*;
using CuFunction = struct CUfunc_st*;
using CuContext = struct CUctx_st*;
using CuStream = struct CUstream_st*;

// Throws std::runtime_error with the driver's own words.
class Driver {
 public:
  // The one driver of this process; throws when there is none.
  static const Driver& get();

  int version() const;  // 13000 for 13.0
  int device_count() const;
  std::string device_name(int device) const;
  int compute_capability(int device) const;  // 90 for 9.0
  int multiprocessors(int device) const;

  CuLibrary load(const std::string& cubin) const;
  CuKernel kernel(CuLibrary library, const char* name) const;
  // Loads the kernel onto the device, with so much dynamic shared memory, before any launch or graph capture.
  void ready(CuKernel kernel, int device, int shared_bytes) const;
  // `arguments` points to each, as many as the kernel takes.
  void launch(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, CuStream stream,
              const void* const* arguments) const;
  // The same for kernels of few blocks, from compute capability 9.0 on: `cluster` blocks each are a cluster, and the
  // kernel may be started before the one that it follows in the stream has ended, for whose end it waits by itself.
  void launch_small(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, CuStream stream,
                    const void* const* arguments, unsigned cluster) const;
  // Of a 4-dimensional array of 16-bit elements, the fastest dimension first, which is contiguous; its first element is
  // on 16 bytes, and the strides in bytes of the others are multiples of 16. What TensorMaps says holds for the copies.
  TensorMap tensor_map(void* data, const unsigned long long (&sizes)[4], const unsigned long long (&strides)[3],
                       const unsigned (&box)[4]) const;
  void zero(void* floats, size_t count, CuStream stream) const;
  bool capturing(CuStream stream) const;  // whether what is enqueued goes into a graph instead of running

 private:
  Driver();
  void check(int result, const char* what) const;

  struct Functions;
  const Functions* f_;
};

// One NVRTC library.
class Nvrtc {
 public:
  // Those that can be opened: `paths` first, then by the loader's own search. `error` says why there is none. What was
  // found is remembered for these paths; that nothing was is not, since libraries may be loaded later.
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
  // The best target for a device of compute capability `arch`: itself, or an older one of the same major version,
  // whose cubins it runs; 0 when there is none.
  int target(int arch) const;

 private:
  explicit Nvrtc(const std::string& name);  // a path, or what the loader searches for; throws std::runtime_error
  void check(int result, const char* what) const;

  struct Functions;
  const Functions* f_;
  std::string path_;
  int major_ = 0, minor_ = 0;
  std::vector<int> archs_;
};

}  // namespace jax_flash::cuda
