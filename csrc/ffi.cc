// XLA FFI handlers: validate, decode, route. And the Python module that hands them out.
//
// The handlers are stateless. Both platforms share the decoding; what differs is the context they get from XLA.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "xla/ffi/api/ffi.h"

#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "cuda/disk_cache.h"
#include "cuda/jit.h"
#include "cuda/tuned.h"
#include "options.h"
#include "problem.h"
#include "recording.h"

namespace ffi = xla::ffi;
namespace nb = nanobind;

namespace jax_flash {

// Calls read(name, field) for the fields of the option record, in its order.
template <typename Read>
void for_each_field(Options& options, Read read) {
#define JAX_FLASH_READ(type, name) read(#name, options.name);
#define JAX_FLASH_READ_FEATURE(type, name, absent) read(#name, options.name);
#define JAX_FLASH_READ_OPERAND(type, name, dims) read("has_" #name, options.has_##name);
#define JAX_FLASH_READ_TRAINABLE(type, name, dims) \
  read("has_" #name, options.has_##name);          \
  read("has_d" #name, options.has_d##name);
  JAX_FLASH_OPTIONS(JAX_FLASH_READ, JAX_FLASH_READ, JAX_FLASH_READ_FEATURE, JAX_FLASH_READ_OPERAND,
                    JAX_FLASH_READ_TRAINABLE)
#undef JAX_FLASH_READ_TRAINABLE
#undef JAX_FLASH_READ_OPERAND
#undef JAX_FLASH_READ_FEATURE
#undef JAX_FLASH_READ
}

}  // namespace jax_flash

// The attributes of a call are the option record, field by field, decoded by name. XLA's own decoding of a struct looks
// for each from the first attribute on; but they come ordered by name, so that of every name the place is known.
namespace xla::ffi {

template <>
struct AttrsBinding<jax_flash::Options> {
  using Attrs = jax_flash::Options;
};

template <>
struct AttrDecoding<jax_flash::Options> {
  using Type = jax_flash::Options;

#define JAX_FLASH_NAME(type, name) #name,
#define JAX_FLASH_FEATURE_NAME(type, name, absent) #name,
#define JAX_FLASH_OPERAND_NAME(type, name, dims) "has_" #name,
#define JAX_FLASH_TRAINABLE_NAME(type, name, dims) "has_" #name, "has_d" #name,
  static constexpr std::string_view kNames[] = {JAX_FLASH_OPTIONS(
      JAX_FLASH_NAME, JAX_FLASH_NAME, JAX_FLASH_FEATURE_NAME, JAX_FLASH_OPERAND_NAME, JAX_FLASH_TRAINABLE_NAME)};
#undef JAX_FLASH_TRAINABLE_NAME
#undef JAX_FLASH_OPERAND_NAME
#undef JAX_FLASH_FEATURE_NAME
#undef JAX_FLASH_NAME
  static constexpr size_t kCount = std::size(kNames);

  // How many names come before each.
  static constexpr std::array<size_t, kCount> places() {
    std::array<size_t, kCount> places{};
    for (size_t i = 0; i < kCount; ++i) {
      for (std::string_view other : kNames) places[i] += other < kNames[i];
    }
    return places;
  }

  static std::optional<Type> Decode(XLA_FFI_AttrType, void* attr, DiagnosticEngine& diagnostic) {
    static constexpr std::array<size_t, kCount> kPlaces = places();
    const auto& attrs = *static_cast<const XLA_FFI_Attrs*>(attr);
    Type options{};
    bool complete = attrs.size == static_cast<int64_t>(kCount);
    size_t next = 0;
    jax_flash::for_each_field(options, [&](const char*, auto& field) {
      const size_t name = next++, place = kPlaces[name];
      if (!complete) return;
      const XLA_FFI_ByteSpan& found = *attrs.names[place];
      complete = std::string_view(found.ptr, found.len) == kNames[name];
      if (!complete) return;
      auto value = AttrDecoding<std::remove_reference_t<decltype(field)>>::Decode(attrs.types[place],
                                                                                  attrs.attrs[place], diagnostic);
      complete = value.has_value();
      if (complete) field = *value;
    });
    if (complete) return options;
    diagnostic.Emit("The attributes are not those of jax_flash's options");
    return std::nullopt;
  }
};

}  // namespace xla::ffi

namespace jax_flash {
namespace {

void require(bool condition, const std::string& what) {
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

// What is accumulated in, and what statistics, sinks, slopes and the gradients of trainable operands are.
ffi::DataType wide(ffi::DataType type) { return type == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32; }

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

void* statistic(const ffi::AnyBuffer& buffer, const Problem& p, ffi::DataType type, const char* name) {
  auto dims = buffer.dimensions();
  if (buffer.element_type() != wide(type) || dims.size() != 3 || dims[0] != p.batch || dims[1] != p.q_heads ||
      dims[2] != p.q_length) {
    throw std::invalid_argument(std::string(name) + " has the wrong shape or dtype");
  }
  return buffer.untyped_data();
}

int64_t extent(char dim, const Problem& p) {
  auto blocks = [](int length) { return (static_cast<int64_t>(length) + kSegmentBlock - 1) / kSegmentBlock; };
  switch (dim) {
    case 'b': return p.batch;
    case 'd': return p.options.documents;
    case 'e': return int64_t{p.options.documents} + 1;
    case 'n': return p.q_heads;
    case 'k': return p.kv_heads;
    case '5': return 5;
    case 't': return p.q_length;
    case 's': return p.kv_length;
    case 'i': return blocks(p.q_length);
    case 'j': return blocks(p.kv_length);
    case '2': return 2;
    default: throw std::logic_error("an operand has a dimension of no meaning");
  }
}

// Of a dense [batch, heads, rows, columns] array; 0 where a dimension of size 1 is broadcast.
Strides strides(const std::vector<int64_t>& sizes) {
  int64_t all[4], stride = 1;
  for (int i = 3; i >= 0; --i) {
    all[i] = sizes.at(i) == 1 ? 0 : stride;
    stride *= sizes[i];
  }
  return {all[0], all[1], all[2], all[3]};
}

// The elements of an operand whose dimensions are `dims` of options.h. With `broadcast` it may be, and
// gets its strides.
void* operand(const ffi::AnyBuffer& buffer, const Problem& p, const std::string& dims, ffi::DataType type,
              const char* name, Strides* broadcast) {
  auto sizes = buffer.dimensions();
  require(buffer.element_type() == type, std::string(name) + " has the wrong dtype");
  require(sizes.size() == dims.size(), std::string(name) + " has the wrong rank");
  for (size_t i = 0; i < dims.size(); ++i) {
    require(sizes[i] == extent(dims[i], p) || (broadcast && sizes[i] == 1), std::string(name) + " has the wrong shape");
  }
  if (broadcast) *broadcast = strides({sizes.begin(), sizes.end()});
  return buffer.untyped_data();
}

ffi::DataType type_of(const int*, ffi::DataType) { return ffi::DataType::S32; }
ffi::DataType type_of(const unsigned*, ffi::DataType) { return ffi::DataType::U32; }
ffi::DataType type_of(const float*, ffi::DataType) { return ffi::DataType::F32; }
ffi::DataType type_of(const bool*, ffi::DataType) { return ffi::DataType::PRED; }
ffi::DataType type_of(const void*, ffi::DataType element) { return wide(element); }

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
  int64_t room;  // elements of its scratch
};

// Arrays in two parts have the columns of both.
int parts_of(const Options& options) { return options.has_unscales && options.highest_precision ? 2 : 1; }

enum class Platform { cpu, cuda };

// forward:  (q, k, v, operands...) -> (out, lse[, scratch])
// backward: (q, k, v, dout, lse, delta, operands...) -> (dq, dk, dv, gradients of operands...[, scratch])
// On CPUs the backward takes (dlse, out) instead of delta. How large the scratch is was said when the call was lowered,
// maybe for another machine, and where there is none none was wanted: what a call needs of it is for the platform to
// say.
Call decode(Platform platform, Pass pass, const Options& options, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Call call{};
  Problem& p = call.problem;
  p.options = options;
  ffi::AnyBuffer q = argument(args, 0), k = argument(args, 1), v = argument(args, 2);
  ffi::DataType type = q.element_type();
  call.dtype = decode_dtype(type);
  require(q.dimensions().size() == 4 && k.dimensions().size() == 4 && v.dimensions().size() == 4,
          "query, key and value must have rank 4");
  p.batch = narrow(q.dimensions()[0], "batch");
  p.q_length = narrow(q.dimensions()[1], "query length");
  p.q_heads = narrow(q.dimensions()[2], "query heads");
  p.head_dim = narrow(q.dimensions()[3], "head_dim");
  p.kv_length = narrow(k.dimensions()[1], "key length");
  p.kv_heads = narrow(k.dimensions()[2], "key heads");
  p.value_head_dim = narrow(v.dimensions()[3], "value_head_dim");
  narrow(options.documents, "documents");
  require(static_cast<int64_t>(p.q_length) + p.kv_length <= std::numeric_limits<int>::max(),
          "query and key lengths must add up to less than 2^31");
  require(p.q_heads % p.kv_heads == 0, "query heads must be a multiple of key heads");

  const int parts = parts_of(options);
  p.head_dim /= parts;
  p.value_head_dim /= parts;
  const ffi::DataType result_type = options.has_unscales ? ffi::DataType::F32 : type;
  auto on_queries = [&](const ffi::AnyBuffer& buffer, int head_dim, ffi::DataType element, const char* name) {
    return tensor(buffer, p.batch, p.q_length, p.q_heads, head_dim, element, name);
  };
  auto on_keys = [&](const ffi::AnyBuffer& buffer, int head_dim, ffi::DataType element, const char* name) {
    return tensor(buffer, p.batch, p.kv_length, p.kv_heads, head_dim, element, name);
  };
  p.q = on_queries(q, parts * p.head_dim, type, "query");
  p.k = on_keys(k, parts * p.head_dim, type, "key");
  p.v = on_keys(v, parts * p.value_head_dim, type, "value");
  size_t next = 3;
  size_t results = 2;
  if (pass == Pass::forward) {
    p.out = on_queries(result(rets, 0), p.value_head_dim, result_type, "out");
    p.lse = statistic(result(rets, 1), p, type, "lse");
  } else {
    p.dout = on_queries(argument(args, next++), parts * p.value_head_dim, type, "dout");
    p.lse = statistic(argument(args, next++), p, type, "lse");
    if (platform == Platform::cpu) {
      p.dlse = statistic(argument(args, next++), p, type, "dlse");
      p.out = on_queries(argument(args, next++), p.value_head_dim, type, "out");
    } else {
      p.delta = statistic(argument(args, next++), p, type, "delta");
    }
    p.dq = on_queries(result(rets, 0), p.head_dim, result_type, "dq");
    p.dk = on_keys(result(rets, 1), p.head_dim, result_type, "dk");
    p.dv = on_keys(result(rets, 2), p.value_head_dim, result_type, "dv");
    results = 3;
  }
  auto strides_of = [&](const std::string& name) {
    return name == "bias"    ? &p.bias_strides
           : name == "dbias" ? &p.dbias_strides
           : name == "mask"  ? &p.mask_strides
                             : nullptr;
  };
#define JAX_FLASH_CONSTANT(type_, name)
#define JAX_FLASH_FEATURE(type_, name, absent)
#define JAX_FLASH_OPERAND(type_, name, dims)                                                                         \
  if (options.has_##name) {                                                                                          \
    ffi::DataType element = type_of(p.name, type);                                                                   \
    if (std::string(#name) == "bias" && !options.wide_bias) element = type;                                          \
    p.name = static_cast<const type_*>(operand(argument(args, next++), p, dims, element, #name, strides_of(#name))); \
  }
#define JAX_FLASH_TRAINABLE(type_, name, dims)                                                           \
  JAX_FLASH_OPERAND(type_, name, dims)                                                                   \
  if (options.has_d##name) {                                                                             \
    p.d##name = operand(result(rets, results++), p, dims, wide(type), "d" #name, strides_of("d" #name)); \
  }
  JAX_FLASH_OPTIONS(JAX_FLASH_CONSTANT, JAX_FLASH_CONSTANT, JAX_FLASH_FEATURE, JAX_FLASH_OPERAND, JAX_FLASH_TRAINABLE)
#undef JAX_FLASH_TRAINABLE
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_CONSTANT
  require(options.documents == 1 || (options.has_cu_q_lengths && options.has_cu_kv_lengths),
          "documents need cu_q_lengths and cu_kv_lengths");
  if (rets.size() == results + 1) {
    ffi::AnyBuffer buffer = result(rets, results++);
    require(buffer.element_type() == wide(type), "scratch has the wrong dtype");
    call.room = static_cast<int64_t>(buffer.element_count());
    p.scratch = buffer.untyped_data();
  }
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
  } catch (...) {  // XLA is compiled without exceptions
    return ffi::Error::Internal("jax_flash: an exception of an unknown type");
  }
}

// Runs items on at most `threads` threads of XLA's pool. The handler itself occupies a pool thread, so it must never
// wait for a helper to be scheduled: the caller works too, and waits only for items that some running thread has taken.
// Two threads and six concurrent calls deadlock any scheme that waits for its helpers.
//
// Whoever waits looks for the end for a while before it sleeps, which takes longer than most waits.
void run_on_pool(ffi::ThreadPool& pool, int64_t items, int64_t threads, const std::function<void(int64_t)>& body) {
  int64_t helpers = std::min<int64_t>({pool.num_threads(), items, threads}) - 1;
  if (helpers <= 0) {
    for (int64_t item = 0; item < items; ++item) body(item);
    return;
  }
  struct Job {
    std::function<void(int64_t)> body;
    int64_t items;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
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
      if (failure) error = failure;
      if ((done += mine) == items) finished.notify_all();
    }
  };
  auto job = std::make_shared<Job>();
  job->body = body;
  job->items = items;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->work(); });
  job->work();
  constexpr std::chrono::microseconds kLook{50};
  for (auto begin = std::chrono::steady_clock::now();
       job->done != items && std::chrono::steady_clock::now() - begin < kLook;) {
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(job->mutex);
  job->finished.wait(lock, [&] { return job->done == job->items; });
  if (job->error) std::rethrow_exception(job->error);
}

template <Pass pass>
ffi::Error run_cpu(ffi::ThreadPool pool, Options options, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    Call call = decode(Platform::cpu, pass, options, args, rets);
    cpu::ParallelFor parallel_for = [&](int64_t items, int64_t threads, const std::function<void(int64_t)>& body) {
      run_on_pool(pool, items, threads, body);
    };
    if constexpr (pass == Pass::forward) {
      cpu::forward(call.dtype, call.problem, pool.num_threads(), parallel_for);
    } else {
      const int64_t wanted = cpu::backward_scratch(call.dtype, call.problem);
      if (call.room < wanted) {
        throw std::invalid_argument("scratch must have at least " + std::to_string(wanted) + " elements, got " +
                                    std::to_string(call.room));
      }
      cpu::backward(call.dtype, call.problem, pool.num_threads(), parallel_for);
    }
  });
}

template <Pass pass>
ffi::Error prepare_cuda(int32_t device, Options options, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    Call call = decode(Platform::cuda, pass, options, args, rets);
    cuda::prepare(device, pass, call.dtype, call.problem, call.room);
  });
}

template <Pass pass>
ffi::Error run_cuda(cuda::Stream stream, int32_t device, Options options, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  return guarded([&] {
    Call call = decode(Platform::cuda, pass, options, args, rets);
    cuda::launch(device, stream, pass, call.dtype, call.problem, call.room);
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

bool asks_for_metadata(const XLA_FFI_CallFrame& call) {
  return call.extension_start && call.extension_start->type == XLA_FFI_Extension_Metadata;
}

XLA_FFI_Error* handed_over(const XLA_FFI_Api* api, const ffi::Error& error) {
  if (error.success()) return nullptr;
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = error.message().c_str();
  args.errc = static_cast<XLA_FFI_Error_Code>(*error.errc());
  return api->XLA_FFI_Error_Create(&args);
}

// What the recorded calls are made of, by the first node of each. XLA does not say when it destroys a graph; but it
// takes the memory of nodes for other ones then, which come to stand in the place of what was there.
class RecordedCalls {
 public:
  void put(const recording::Command* first, const cuda::Recorded& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.insert_or_assign(first, call);
  }
  std::optional<cuda::Recorded> get(const recording::Command* first) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(first);
    return found == calls_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const recording::Command*, cuda::Recorded> calls_;
};

// From jaxlib 0.11.2 on a handler can say which kernels XLA is to put into its CUDA graph. XLA's own decoding of calls
// knows of it in newer headers than those that we may be built with.
XLA_FFI_Error* record_forward_cuda(XLA_FFI_CallFrame* call_frame) {
  if (asks_for_metadata(*call_frame)) return kForwardCuda(call_frame);
  XLA_FFI_Error* error = nullptr;  // XLA's
  const ffi::Error ours = guarded([&] {
    recording::FindExtension find{sizeof(find), nullptr, call_frame->ctx, recording::kExtension, nullptr};
    error = reinterpret_cast<const recording::Api*>(call_frame->api)->find_extension(&find);
    if (error) return;
    require(find.found && recording::knows_record({find.found->major, find.found->minor}),
            "XLA records kernels by an interface that is not known here");
    const recording::Frame& frame = *find.found->frame;

    XLA_FFI_DeviceOrdinal_Get_Args device{};
    device.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
    device.ctx = call_frame->ctx;
    error = call_frame->api->XLA_FFI_DeviceOrdinal_Get(&device);
    if (error) return;

    ffi::DiagnosticEngine diagnostic;
    const std::optional<Options> options =
        ffi::AttrDecoding<Options>::Decode(XLA_FFI_AttrType_DICTIONARY, &call_frame->attrs, diagnostic);
    require(options.has_value(), diagnostic.Result());
    const Call call = decode(Platform::cuda, Pass::forward, *options, ffi::RemainingArgs(&call_frame->args, 0),
                             ffi::RemainingRets(&call_frame->rets, 0));
    static RecordedCalls calls;
    const bool updates = frame.action == recording::Action::update;
    const std::optional<cuda::Recorded> recorded =
        updates ? calls.get(frame.commands[0])
                : cuda::record(device.device_ordinal, call.dtype, call.problem, call.room);
    require(recorded.has_value(), "XLA updates a node that was not recorded here");
    const std::vector<cuda::GraphNode> nodes = cuda::graph_nodes(*recorded, call.problem);
    require(static_cast<int64_t>(nodes.size()) <= frame.capacity, "XLA has room for fewer kernels than the call needs");
    for (size_t i = 0; i < nodes.size() && !error; ++i) {
      const cuda::GraphNode& node = nodes[i];
      const recording::Argument values[] = {{&node.problem, sizeof(node.problem), recording::Kind::host_value},
                                            {&node.maps, sizeof(node.maps), recording::Kind::host_value}};
      const recording::Arguments arguments{values, node.has_maps ? 2 : 1};
      if (updates) {
        error = frame.functions->update_launch(frame.context, frame.commands[i], &arguments);
        continue;
      }
      auto dim = [](unsigned x) { return recording::Dim3{static_cast<int32_t>(x), 1, 1}; };
      const recording::Dims dims{dim(node.blocks), dim(node.threads),
                                 node.cluster > 1 ? dim(node.cluster) : recording::Dim3{0, 0, 0}};
      // The first follows what XLA says, the next one the first.
      error = frame.functions->create_launch(frame.context, node.name, node.cubin->data(),
                                             static_cast<int64_t>(node.cubin->size()), recording::Format::cubin, dims,
                                             node.shared_bytes, node.overlaps, &arguments,
                                             i ? &frame.commands[i - 1] : nullptr, i ? 1 : 0, &frame.commands[i]);
      *frame.count = static_cast<int64_t>(i) + 1;
    }
    if (error || updates) return;
    calls.put(frame.commands[0], *recorded);
    cuda::count_recorded();
  });
  return error ? error : handed_over(call_frame->api, ours);
}

// JAX's plugin for CUDA (0.11.2) hands XLA all handlers of a target but `record`. So XLA is asked by itself, when it
// asks this handler, of a target that no program calls, what it can do: that is when it says where its functions are.
XLA_FFI_Error* register_forward_cuda(XLA_FFI_CallFrame* call_frame) {
  if (asks_for_metadata(*call_frame)) {
    const XLA_FFI_Api& api = *call_frame->api;
    const recording::Version version{api.api_version.major_version, api.api_version.minor_version};
    if (!recording::knows_ffi(version)) {
      return handed_over(&api, ffi::Error::InvalidArgument(
                                   "jax_flash: JAX's plugin for CUDA has XLA FFI API " + std::to_string(version.major) +
                                   "." + std::to_string(version.minor) + ", which is not that of the running jaxlib"));
    }
    const std::string_view name = "jax_flash_forward", platform = "CUDA";
    recording::Registration args{};
    args.struct_size = recording::kRegistrationSize;
    args.name = {name.data(), name.size()};
    args.platform = {platform.data(), platform.size()};
    // Nothing to initialize, which XLA would in every run, a microsecond a call: the first call of a kind finds its
    // kernels when it is recorded, or without a graph when it is launched.
    args.execute = kForwardCuda;
    args.record = record_forward_cuda;
    if (XLA_FFI_Error* error = api.XLA_FFI_Handler_Register(reinterpret_cast<XLA_FFI_Handler_Register_Args*>(&args))) {
      return error;
    }
  }
  return kForwardCuda(call_frame);
}

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
  if (name == "backward_dq") return Pass::backward_dq;
  if (name == "backward_bias") return Pass::backward_bias;
  if (name == "forward_few") return Pass::forward_few;
  if (name == "forward_tiny") return Pass::forward_tiny;
  throw std::invalid_argument(
      "pass_ must be forward, backward, backward_dq, backward_bias, forward_few or forward_tiny, got " + name);
}

// The record from the attributes of a call; what is not named is absent.
Options named_options(const nb::dict& attributes) {
  Options options{};
  options.documents = 1;
  size_t known = 0;
  for_each_field(options, [&](const char* name, auto& field) {
    if (!attributes.contains(name)) return;
    field = nb::cast<std::remove_reference_t<decltype(field)>>(attributes[name]);
    ++known;
  });
  if (known != attributes.size()) throw std::invalid_argument("options must be named as in the option record");
  return options;
}

nb::dict row_of(const cuda::Kernel& k) {
  nb::dict row;
  row["name"] = k.name;
  row["path"] = k.path;
  row["pass"] = k.pass;
  row["head_dim"] = k.head_dim;
  row["value_head_dim"] = k.value_head_dim;
  row["block_q"] = k.block_q;
  row["block_kv"] = k.block_kv;
  row["registers"] = k.registers;
  row["shared_bytes"] = k.shared_bytes;
  row["threads"] = k.threads;
  row["spill_bytes"] = k.spill_bytes;
  row["local_bytes"] = k.local_bytes;
  row["cubin_bytes"] = k.cubin_bytes;
  row["complaints"] = k.complaints;
  return row;
}

// A tile row by the names of its fields, all of which are there.
cuda::TileRow named_tile_row(const nb::dict& named) {
  cuda::TileRow row{};
#define JAX_FLASH_FIELD(field) row.field = nb::cast<int>(named[#field]);
  JAX_FLASH_TILE_FIELDS(JAX_FLASH_FIELD)
#undef JAX_FLASH_FIELD
  return row;
}

// What plans and scratch are a function of, but for head dims.
Problem shape_of(const Options& options, int batch, int q_length, int kv_length, int q_heads, int kv_heads) {
  Problem p{};
  p.options = options;
  p.batch = batch;
  p.q_length = q_length;
  p.kv_length = kv_length;
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  return p;
}

// Elements of scratch that a call of Python's description wants.
struct Scratch {
  Pass pass;
  bool cuda;
  DType dtype;
  Problem problem;

  Scratch(const std::string& pass_, const std::string& platform, const std::string& dtype_, const nb::dict& options,
          int q_length, int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim,
          const std::vector<int64_t>& bias_shape)
      : pass(named_pass(pass_)),
        cuda(platform == "cuda"),
        dtype(named_dtype(dtype_)),
        problem(shape_of(named_options(options), 1, q_length, kv_length, q_heads, kv_heads)) {
    problem.head_dim = head_dim / parts_of(problem.options);
    problem.value_head_dim = value_head_dim / parts_of(problem.options);
    if (!bias_shape.empty()) problem.bias_strides = strides(bias_shape);
  }

  int64_t of_batch(int batch) {
    problem.batch = batch;
    if (cuda) return (pass == Pass::forward ? cuda::forward_scratch : cuda::backward_scratch)(dtype, problem);
    return pass == Pass::forward ? 0 : cpu::backward_scratch(dtype, problem);
  }

  // (a, b) with of_batch(B) <= a * B + b for all B. From kMany batch entries on there is work for all threads and
  // multiprocessors, so that nothing is split any more: then scratch grows by as much with each.
  std::pair<int64_t, int64_t> of_any_batch() {
    constexpr int kMany = 1024;
    const int64_t each = of_batch(kMany + 1) - of_batch(kMany);
    int64_t more = 0;
    for (int batch = 1; batch <= kMany; ++batch) more = std::max(more, of_batch(batch) - each * batch);
    return {each, more};
  }
};

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

}  // namespace
}  // namespace jax_flash

NB_MODULE(_core, m) {
  using namespace jax_flash;
  const std::vector<std::string> kPasses{"forward",       "backward",    "backward_dq",
                                         "backward_bias", "forward_few", "forward_tiny"};
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  nb::list known;
  for (const auto& [api, record] : recording::kKnown) {
    known.append(nb::make_tuple(nb::make_tuple(api.major, api.minor), nb::make_tuple(record.major, record.minor)));
  }
  m.attr("RECORD_API_VERSIONS") = nb::tuple(known);

  nb::list operands;
#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_FEATURE(type, name, absent)
#define JAX_FLASH_NAME(type, name, dims) operands.append(nb::make_tuple(#name, dims));
  JAX_FLASH_OPTIONS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_FEATURE, JAX_FLASH_NAME, JAX_FLASH_NAME)
#undef JAX_FLASH_NAME
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_NOTHING
  m.attr("OPERANDS") = nb::tuple(operands);

  m.def(
      "handlers",
      [](bool records) {
        nb::dict cpu, cuda, forward, backward;
        cpu["jax_flash_forward"] = capsule(kForwardCpu);
        cpu["jax_flash_backward"] = capsule(kBackwardCpu);
        forward["initialize"] = capsule(kForwardCudaPrepare);
        forward["execute"] = capsule(kForwardCuda);
        backward["initialize"] = capsule(kBackwardCudaPrepare);
        backward["execute"] = capsule(kBackwardCuda);
        cuda["jax_flash_forward"] = forward;
        if (records) {
          cuda.clear();
          cuda["jax_flash_register_forward"] = capsule(register_forward_cuda);
        }
        cuda["jax_flash_backward"] = backward;
        nb::dict all;
        all["cpu"] = cpu;
        all["CUDA"] = cuda;
        return all;
      },
      nb::kw_only(), nb::arg("records"));

  m.def(
      "scratch",
      [](const std::string& pass, const std::string& platform, const std::string& dtype, const nb::dict& options,
         int batch, int q_length, int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim,
         const std::vector<int64_t>& bias_shape) -> int64_t {
        return Scratch(pass, platform, dtype, options, q_length, kv_length, q_heads, kv_heads, head_dim, value_head_dim,
                       bias_shape)
            .of_batch(batch);
      },
      nb::kw_only(), nb::arg("pass_"), nb::arg("platform"), nb::arg("dtype"), nb::arg("options"), nb::arg("batch"),
      nb::arg("q_length"), nb::arg("kv_length"), nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
      nb::arg("value_head_dim"), nb::arg("bias_shape"));

  m.def(
      "scratch_of_any_batch",
      [](const std::string& pass, const std::string& platform, const std::string& dtype, const nb::dict& options,
         int q_length, int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim,
         const std::vector<int64_t>& bias_shape) {
        return Scratch(pass, platform, dtype, options, q_length, kv_length, q_heads, kv_heads, head_dim, value_head_dim,
                       bias_shape)
            .of_any_batch();
      },
      nb::kw_only(), nb::arg("pass_"), nb::arg("platform"), nb::arg("dtype"), nb::arg("options"), nb::arg("q_length"),
      nb::arg("kv_length"), nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_head_dim"),
      nb::arg("bias_shape"));

  m.def(
      "plan_few",
      [](int batch, int q_length, int kv_length, int q_heads, int kv_heads, const nb::dict& options) {
        Problem p = shape_of(named_options(options), batch, q_length, kv_length, q_heads, kv_heads);
        const cuda::FewPlan plan = cuda::plan_few(p);
        return std::make_pair(plan.rows, plan.slices);
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("q_length"), nb::arg("kv_length"), nb::arg("q_heads"),
      nb::arg("kv_heads"), nb::arg("options"));

  m.def(
      "is_tiny",
      [](int batch, int q_length, int kv_length, int q_heads, int kv_heads) {
        return cuda::is_tiny(shape_of(named_options({}), batch, q_length, kv_length, q_heads, kv_heads));
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("q_length"), nb::arg("kv_length"), nb::arg("q_heads"),
      nb::arg("kv_heads"));

  m.def(
      "group_splits",
      [](int batch, int q_length, int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim,
         const nb::dict& options) {
        Problem p = shape_of(named_options(options), batch, q_length, kv_length, q_heads, kv_heads);
        p.head_dim = head_dim;
        p.value_head_dim = value_head_dim;
        return cuda::group_splits(p);
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("q_length"), nb::arg("kv_length"), nb::arg("q_heads"),
      nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_head_dim"), nb::arg("options"));

  m.def("cpu_isa", &cpu::isa);

  m.def(
      "configure_cuda",
      [](std::string source_dir, std::vector<std::string> prebuilt_dirs, std::vector<std::string> nvrtc_paths) {
        cuda::configure({std::move(source_dir), std::move(prebuilt_dirs), std::move(nvrtc_paths)});
      },
      nb::kw_only(), nb::arg("source_dir"), nb::arg("prebuilt_dirs"), nb::arg("nvrtc_paths"));

  m.def("largest_head_dim", &cuda::largest_head_dim, nb::kw_only(), nb::arg("arch"), nb::arg("highest_precision"));

  m.def("separate_dq", &cuda::separate_dq, nb::kw_only(), nb::arg("arch"), nb::arg("largest_head_dim"));

  m.def("cuda_launches", [] {
    const cuda::Launches launches = cuda::launches();
    return nb::make_tuple(launches.all, launches.captured, launches.recorded);
  });

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
    out["cache_problem"] = s.cache_problem;
    out["devices"] = devices;
    return out;
  });

  m.def(
      "build_kernels",
      [](int arch, const std::string& out_dir, const std::vector<std::string>& dtypes,
         const std::vector<std::pair<int, int>>& head_dims, const std::vector<nb::dict>& options,
         const std::string& family, const std::vector<std::string>& passes) {
        std::vector<DType> types;
        std::vector<Pass> wanted;
        for (const std::string& pass : passes) wanted.push_back(named_pass(pass));
        for (const std::string& dtype : dtypes) types.push_back(named_dtype(dtype));
        std::vector<Options> records;
        for (const nb::dict& attributes : options) records.push_back(named_options(attributes));
        std::vector<cuda::Kernel> kernels;
        {
          nb::gil_scoped_release release;
          kernels = cuda::build(arch, types, head_dims, records, out_dir, family, wanted);
        }
        nb::list rows;
        for (const cuda::Kernel& k : kernels) rows.append(row_of(k));
        return rows;
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("out_dir"), nb::arg("dtypes"), nb::arg("head_dims"), nb::arg("options"),
      nb::arg("family") = "", nb::arg("passes") = kPasses);

  m.def(
      "fetch_kernel",
      [](int arch, const std::string& pass, const std::string& dtype, int head_dim, int value_head_dim,
         const nb::dict& attributes, const std::string& gpu) {
        Options options = named_options(attributes);
        nb::gil_scoped_release release;
        return cuda::fetch(arch, named_pass(pass), named_dtype(dtype), head_dim, value_head_dim, options, gpu);
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("pass_"), nb::arg("dtype"), nb::arg("head_dim"),
      nb::arg("value_head_dim"), nb::arg("options"), nb::arg("gpu") = "");

  m.def("cache_path", &cuda::cache_path);
  m.def("cache_refusal", [] {
    const cuda::KernelFolder cache = cuda::KernelFolder::cache(false);
    return cache.refused() ? cache.problem() : "";
  });
  m.def("make_cache", [] {
    const cuda::KernelFolder cache = cuda::KernelFolder::cache(true);
    if (!cache.usable() && !cache.path().empty()) throw std::runtime_error(cache.problem());
  });
  m.def("clear_cache", [] {
    const cuda::KernelFolder cache = cuda::KernelFolder::cache(false);
    if (!cache.problem().empty()) throw std::runtime_error(cache.problem());
    const cuda::KernelFolder::Removed removed = cache.clear();
    return std::make_pair(removed.files, removed.bytes);
  });
  m.def("sources_key", &cuda::sources_key);
  nb::list fields;
#define JAX_FLASH_FIELD(field) fields.append(#field);
  JAX_FLASH_TILE_FIELDS(JAX_FLASH_FIELD)
#undef JAX_FLASH_FIELD
  m.attr("TILE_FIELDS") = nb::tuple(fields);

  m.def("tune", [](const std::vector<nb::dict>& rows) {
    std::vector<cuda::TunedRow> tuned;
    for (const nb::dict& row : rows) {
      tuned.push_back({nb::cast<std::string>(row["gpu"]), nb::cast<std::string>(row["family"]),
                       named_pass(nb::cast<std::string>(row["pass"])), nb::cast<int>(row["head_dim"]),
                       named_tile_row(row)});
    }
    cuda::tune(std::move(tuned));
  });

  m.def(
      "tile_row",
      [](int arch, const std::string& pass, int head_dim, const std::string& gpu) {
        const cuda::Choice choice = cuda::choose(arch, named_pass(pass), head_dim, gpu);
        nb::dict row, found;
#define JAX_FLASH_FIELD(field) row[#field] = choice.row.field;
        JAX_FLASH_TILE_FIELDS(JAX_FLASH_FIELD)
#undef JAX_FLASH_FIELD
        found["family"] = choice.family;
        found["row"] = row;
        found["tuned"] = choice.tuned;
        found["most_shared_bytes"] = choice.most_shared_bytes;
        return found;
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("pass_"), nb::arg("head_dim"), nb::arg("gpu") = "");

  m.def(
      "build_row",
      [](int arch, const std::string& pass, const std::string& dtype, int head_dim, const nb::dict& attributes,
         const nb::dict& row, const std::string& out_dir) {
        const Options options = named_options(attributes);
        const cuda::TileRow tile = named_tile_row(row);
        cuda::Kernel kernel;
        {
          nb::gil_scoped_release release;
          kernel = cuda::build_row(arch, named_pass(pass), named_dtype(dtype), head_dim, options, tile, out_dir);
        }
        return row_of(kernel);
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("pass_"), nb::arg("dtype"), nb::arg("head_dim"), nb::arg("options"),
      nb::arg("row"), nb::arg("out_dir"));
}
