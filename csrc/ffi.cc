// XLA FFI handlers: validate, decode, route. And the Python module that hands them out.
//
// The handlers are stateless. Both platforms share the decoding; what differs is the context they get from XLA.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "xla/ffi/api/ffi.h"

#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "options.h"
#include "problem.h"

namespace ffi = xla::ffi;
namespace nb = nanobind;

// The attributes of a call are the option record, field by field, decoded by name. The second macro is there because
// XLA's splits its arguments before the field list is expanded.
#define JAX_FLASH_MEMBER(type, name) , ffi::StructMember<type>(#name)
#define JAX_FLASH_PRESENCE_MEMBER(type, name) , ffi::StructMember<bool>("has_" #name)
#define JAX_FLASH_REGISTER(...) XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(__VA_ARGS__)
JAX_FLASH_REGISTER(jax_flash::Options JAX_FLASH_OPTIONS(JAX_FLASH_MEMBER, JAX_FLASH_MEMBER, JAX_FLASH_PRESENCE_MEMBER));
#undef JAX_FLASH_REGISTER
#undef JAX_FLASH_PRESENCE_MEMBER
#undef JAX_FLASH_MEMBER

namespace jax_flash {
namespace {

template <typename T>
constexpr ffi::DataType kOperandType = ffi::DataType::INVALID;
template <>
constexpr ffi::DataType kOperandType<int> = ffi::DataType::S32;
template <>
constexpr ffi::DataType kOperandType<float> = ffi::DataType::F32;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

int narrow(int64_t value, const char* what) {
  if (value < 1 || value > std::numeric_limits<int>::max()) {
    throw std::invalid_argument(std::string(what) + " must be in [1, 2^31), got " + std::to_string(value));
  }
  return static_cast<int>(value);
}

DType decode_dtype(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16: return DType::f16;
    case ffi::DataType::BF16: return DType::bf16;
    case ffi::DataType::F32: return DType::f32;
    case ffi::DataType::F64: return DType::f64;
    default: throw std::invalid_argument("query must be float16, bfloat16, float32 or float64");
  }
}

// XLA hands over dense row-major buffers.
Tensor tensor(const ffi::AnyBuffer& buffer, int batch, int length, int heads, int head_dim, ffi::DataType type,
              const char* name) {
  auto dims = buffer.dimensions();
  if (buffer.element_type() != type || dims.size() != 4 || dims[0] != batch || dims[1] != length || dims[2] != heads ||
      dims[3] != head_dim) {
    throw std::invalid_argument(std::string(name) + " has the wrong shape or dtype");
  }
  int64_t row = static_cast<int64_t>(heads) * head_dim;
  return Tensor{buffer.untyped_data(), row * length, row, head_dim};
}

void* statistic(const ffi::AnyBuffer& buffer, const Problem& p, DType dtype, const char* name) {
  auto dims = buffer.dimensions();
  auto type = dtype == DType::f64 ? ffi::DataType::F64 : ffi::DataType::F32;
  if (buffer.element_type() != type || dims.size() != 3 || dims[0] != p.batch || dims[1] != p.q_heads ||
      dims[2] != p.q_length) {
    throw std::invalid_argument(std::string(name) + " has the wrong shape or dtype");
  }
  return buffer.untyped_data();
}

ffi::AnyBuffer argument(ffi::RemainingArgs args, size_t index) {
  auto value = args.get<ffi::AnyBuffer>(index);
  if (!value.has_value()) throw std::invalid_argument(value.error().message());
  return *value;
}

ffi::AnyBuffer result(ffi::RemainingRets rets, size_t index) {
  auto value = rets.get<ffi::AnyBuffer>(index);
  if (!value.has_value()) throw std::invalid_argument(value.error().message());
  return **value;
}

struct Call {
  DType dtype;
  Problem problem;
};

// forward:  (q, k, v, operands...) -> (out, lse)
// backward: (q, k, v, dout, lse, delta, operands...) -> (dq, dk, dv[, scratch])
Call decode(Pass pass, const Options& options, ffi::RemainingArgs args, ffi::RemainingRets rets,
            int64_t (*backward_scratch)(DType, const Problem&)) {
  Call call{};
  Problem& p = call.problem;
  p.options = options;
  ffi::AnyBuffer q = argument(args, 0), k = argument(args, 1), v = argument(args, 2);
  ffi::DataType type = q.element_type();
  call.dtype = decode_dtype(type);
  require(q.dimensions().size() == 4 && k.dimensions().size() == 4, "query and key must have rank 4");
  p.batch = narrow(q.dimensions()[0], "batch");
  p.q_length = narrow(q.dimensions()[1], "query length");
  p.q_heads = narrow(q.dimensions()[2], "query heads");
  p.head_dim = narrow(q.dimensions()[3], "head_dim");
  p.kv_length = narrow(k.dimensions()[1], "key length");
  p.kv_heads = narrow(k.dimensions()[2], "key heads");
  require(p.head_dim <= 256, "head_dim must be at most 256");
  require(static_cast<int64_t>(p.q_length) + p.kv_length <= std::numeric_limits<int>::max(),
          "query and key lengths must add up to less than 2^31");
  require(p.q_heads % p.kv_heads == 0, "query heads must be a multiple of key heads");

  auto on_queries = [&](const ffi::AnyBuffer& buffer, const char* name) {
    return tensor(buffer, p.batch, p.q_length, p.q_heads, p.head_dim, type, name);
  };
  auto on_keys = [&](const ffi::AnyBuffer& buffer, const char* name) {
    return tensor(buffer, p.batch, p.kv_length, p.kv_heads, p.head_dim, type, name);
  };
  p.q = on_queries(q, "query");
  p.k = on_keys(k, "key");
  p.v = on_keys(v, "value");
  size_t next = 3;
  size_t results = 2;
  if (pass == Pass::forward) {
    p.out = on_queries(result(rets, 0), "out");
    p.lse = statistic(result(rets, 1), p, call.dtype, "lse");
  } else {
    p.dout = on_queries(argument(args, next++), "dout");
    p.lse = statistic(argument(args, next++), p, call.dtype, "lse");
    p.delta = statistic(argument(args, next++), p, call.dtype, "delta");
    p.dq = on_queries(result(rets, 0), "dq");
    p.dk = on_keys(result(rets, 1), "dk");
    p.dv = on_keys(result(rets, 2), "dv");
    results = 3;
    if (int64_t wanted = backward_scratch(call.dtype, p); wanted > 0) {
      ffi::AnyBuffer scratch = result(rets, results++);
      auto scratch_type = call.dtype == DType::f64 ? ffi::DataType::F64 : ffi::DataType::F32;
      require(scratch.element_type() == scratch_type && static_cast<int64_t>(scratch.element_count()) >= wanted,
              "scratch has the wrong dtype or is too small");
      p.scratch = scratch.untyped_data();
    }
  }
#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_DECODE(type, name)                                                    \
  if (options.has_##name) {                                                             \
    ffi::AnyBuffer buffer = argument(args, next++);                                     \
    require(buffer.element_type() == kOperandType<type>, #name " has the wrong dtype"); \
    p.name = static_cast<const type*>(buffer.untyped_data());                           \
  }
  JAX_FLASH_OPTIONS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_DECODE)
#undef JAX_FLASH_DECODE
#undef JAX_FLASH_NOTHING
  require(args.size() == next, "wrong number of operands");
  require(rets.size() == results, "wrong number of results");
  return call;
}

template <typename Body>
ffi::Error guarded(Body&& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(std::string("jax_flash: ") + e.what());
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("jax_flash: ") + e.what());
  }
}

// Runs items on XLA's pool. The handler itself occupies a pool thread, so it must never wait for a helper to be
// scheduled: the caller works too, and waits only for items that some running thread has taken. Two threads and six
// concurrent calls deadlock any scheme that waits for its helpers.
void run_on_pool(ffi::ThreadPool& pool, int64_t items, const std::function<void(int64_t)>& body) {
  struct Job {
    std::function<void(int64_t)> body;
    int64_t items;
    std::atomic<int64_t> next{0};
    int64_t done = 0;
    std::exception_ptr error;
    std::mutex mutex;
    std::condition_variable finished;

    void work() {
      int64_t mine = 0;
      std::exception_ptr failure;
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items; ++mine) {
        try {
          if (!failure) body(item);
        } catch (...) {
          failure = std::current_exception();
        }
      }
      if (mine == 0) return;
      std::lock_guard<std::mutex> lock(mutex);
      done += mine;
      if (failure) error = failure;
      if (done == items) finished.notify_all();
    }
  };
  auto job = std::make_shared<Job>();
  job->body = body;
  job->items = items;
  int64_t helpers = std::min<int64_t>(pool.num_threads(), items) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->work(); });
  job->work();
  std::unique_lock<std::mutex> lock(job->mutex);
  job->finished.wait(lock, [&] { return job->done == job->items; });
  if (job->error) std::rethrow_exception(job->error);
}

template <Pass pass>
ffi::Error run_cpu(ffi::ThreadPool pool, Options options, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    Call call = decode(pass, options, args, rets, cpu::backward_scratch);
    cpu::ParallelFor parallel_for = [&](int64_t items, const std::function<void(int64_t)>& body) {
      run_on_pool(pool, items, body);
    };
    if constexpr (pass == Pass::forward) {
      cpu::forward(call.dtype, call.problem, parallel_for);
    } else {
      cpu::backward(call.dtype, call.problem, parallel_for);
    }
  });
}

int64_t cuda_scratch(DType, const Problem& problem) { return cuda::backward_scratch(problem); }

template <Pass pass>
ffi::Error prepare_cuda(int32_t device, Options options, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    Call call = decode(pass, options, args, rets, cuda_scratch);
    cuda::prepare(device, pass, call.dtype, call.problem);
  });
}

template <Pass pass>
ffi::Error run_cuda(cuda::Stream stream, int32_t device, Options options, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  return guarded([&] {
    Call call = decode(pass, options, args, rets, cuda_scratch);
    cuda::launch(device, stream, pass, call.dtype, call.problem);
  });
}

#define JAX_FLASH_BIND_CPU ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attrs<Options>().RemainingArgs().RemainingRets()
#define JAX_FLASH_BIND_PREPARE                       \
  ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>() \
      .Ctx<ffi::DeviceOrdinal>()                     \
      .Attrs<Options>()                              \
      .RemainingArgs()                               \
      .RemainingRets()
#define JAX_FLASH_BIND_CUDA                     \
  ffi::Ffi::Bind()                              \
      .Ctx<ffi::PlatformStream<cuda::Stream>>() \
      .Ctx<ffi::DeviceOrdinal>()                \
      .Attrs<Options>()                         \
      .RemainingArgs()                          \
      .RemainingRets()

XLA_FFI_DEFINE_HANDLER(kForwardCpu, run_cpu<Pass::forward>, JAX_FLASH_BIND_CPU);
XLA_FFI_DEFINE_HANDLER(kBackwardCpu, run_cpu<Pass::backward>, JAX_FLASH_BIND_CPU);
XLA_FFI_DEFINE_HANDLER(kForwardCudaPrepare, prepare_cuda<Pass::forward>, JAX_FLASH_BIND_PREPARE);
XLA_FFI_DEFINE_HANDLER(kBackwardCudaPrepare, prepare_cuda<Pass::backward>, JAX_FLASH_BIND_PREPARE);
XLA_FFI_DEFINE_HANDLER(kForwardCuda, run_cuda<Pass::forward>, JAX_FLASH_BIND_CUDA, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackwardCuda, run_cuda<Pass::backward>, JAX_FLASH_BIND_CUDA,
                       {ffi::Traits::kCmdBufferCompatible});

DType named_dtype(const std::string& name) {
  if (name == "float16") return DType::f16;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float32") return DType::f32;
  if (name == "float64") return DType::f64;
  throw std::invalid_argument("dtype must be float16, bfloat16, float32 or float64, got " + name);
}

Pass named_pass(const std::string& name) {
  if (name == "forward") return Pass::forward;
  if (name == "backward") return Pass::backward;
  throw std::invalid_argument("pass_ must be forward or backward, got " + name);
}

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

}  // namespace
}  // namespace jax_flash

NB_MODULE(_core, m) {
  using namespace jax_flash;
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);

  nb::list operands;
#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_NAME(type, name) operands.append(#name);
  JAX_FLASH_OPTIONS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_NAME)
#undef JAX_FLASH_NAME
#undef JAX_FLASH_NOTHING
  m.attr("OPERANDS") = nb::tuple(operands);

  m.def("handlers", [] {
    nb::dict cpu, cuda, forward, backward;
    cpu["jax_flash_forward"] = capsule(kForwardCpu);
    cpu["jax_flash_backward"] = capsule(kBackwardCpu);
    forward["initialize"] = capsule(kForwardCudaPrepare);
    forward["execute"] = capsule(kForwardCuda);
    backward["initialize"] = capsule(kBackwardCudaPrepare);
    backward["execute"] = capsule(kBackwardCuda);
    cuda["jax_flash_forward"] = forward;
    cuda["jax_flash_backward"] = backward;
    nb::dict all;
    all["cpu"] = cpu;
    all["CUDA"] = cuda;
    return all;
  });

  m.def(
      "backward_scratch",
      [](const std::string& platform, const std::string& dtype, int batch, int q_length, int kv_length, int q_heads,
         int kv_heads, int head_dim) -> int64_t {
        Problem p{};
        p.batch = batch;
        p.q_length = q_length;
        p.kv_length = kv_length;
        p.q_heads = q_heads;
        p.kv_heads = kv_heads;
        p.head_dim = head_dim;
        if (platform == "cuda") return cuda::backward_scratch(p);
        return cpu::backward_scratch(named_dtype(dtype), p);
      },
      nb::kw_only(), nb::arg("platform"), nb::arg("dtype"), nb::arg("batch"), nb::arg("q_length"), nb::arg("kv_length"),
      nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"));

  m.def("cpu_isa", &cpu::isa);

  m.def(
      "configure_cuda",
      [](std::string source_dir, std::vector<std::string> prebuilt_dirs, std::vector<std::string> nvrtc_paths) {
        cuda::configure({std::move(source_dir), std::move(prebuilt_dirs), std::move(nvrtc_paths)});
      },
      nb::kw_only(), nb::arg("source_dir"), nb::arg("prebuilt_dirs"), nb::arg("nvrtc_paths"));

  m.def("cuda_status", [] {
    cuda::Status s = cuda::status();
    nb::list devices;
    for (const cuda::Device& d : s.devices) {
      nb::dict device;
      device["name"] = d.name;
      device["compute_capability"] = d.compute_capability;
      device["family"] = d.family;
      devices.append(device);
    }
    nb::dict out;
    out["driver"] = s.driver;
    out["driver_error"] = s.driver_error;
    out["nvrtc"] = s.nvrtc;
    out["nvrtc_error"] = s.nvrtc_error;
    out["cache_dir"] = s.cache_dir;
    out["devices"] = devices;
    return out;
  });

  m.def(
      "build_kernels",
      [](int arch, const std::string& out_dir, const std::vector<std::string>& dtypes,
         const std::vector<int>& head_dims) {
        std::vector<DType> types;
        for (const std::string& dtype : dtypes) types.push_back(named_dtype(dtype));
        std::vector<cuda::Kernel> kernels;
        {
          nb::gil_scoped_release release;
          kernels = cuda::build_common(arch, types, head_dims, out_dir);
        }
        nb::list rows;
        for (const cuda::Kernel& k : kernels) {
          nb::dict row;
          row["name"] = k.name;
          row["registers"] = k.registers;
          row["shared_bytes"] = k.shared_bytes;
          row["threads"] = k.threads;
          row["spill_bytes"] = k.spill_bytes;
          row["local_bytes"] = k.local_bytes;
          row["cubin_bytes"] = k.cubin_bytes;
          rows.append(row);
        }
        return rows;
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("out_dir"),
      nb::arg("dtypes") = std::vector<std::string>{"float16", "bfloat16"},
      nb::arg("head_dims") = std::vector<int>{64, 96, 128, 256});

  m.def(
      "fetch_kernel",
      [](int arch, const std::string& pass, const std::string& dtype, int head_dim, bool causal) {
        Options options{};
        options.causal = causal;
        nb::gil_scoped_release release;
        return cuda::fetch(arch, named_pass(pass), named_dtype(dtype), head_dim, options);
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("pass_"), nb::arg("dtype"), nb::arg("head_dim"), nb::arg("causal"));
}
