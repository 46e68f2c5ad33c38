// A forward that records its kernels into XLA's command buffers (CUDA graphs).

#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cuda/host/cuda.h"
#include "ffi/decode.h"
#include "ffi/handlers.h"
#include "ffi/options.h"
#include "ffi/recording.h"

namespace jax_flash {
namespace {

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

// The kernels of each recorded call, by the call's first node. XLA does not report when it destroys a graph, but it
// reuses the memory of nodes, so that new entries overwrite stale ones.
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

// From jaxlib 0.11.2 on a handler can record kernels into XLA's CUDA graph. XLA's own C++ decoding of such calls needs
// newer headers than those that this library may be built with.
XLA_FFI_Error* record_forward_cuda(XLA_FFI_CallFrame* call_frame) {
  if (asks_for_metadata(*call_frame)) return handlers().forward_cuda(call_frame);
  XLA_FFI_Error* error = nullptr;  // XLA's
  const ffi::Error ours = guarded([&] {
    recording::FindExtension find{sizeof(find), nullptr, call_frame->ctx, recording::kExtension, nullptr};
    error = reinterpret_cast<const recording::Api*>(call_frame->api)->find_extension(&find);
    if (error) return;
    require(
        find.found && recording::knows_record({find.found->major, find.found->minor}),
        "this jaxlib's interface for recording kernels into CUDA graphs has a version that jax_flash does not know");
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
                : cuda::record(device.device_ordinal, call.dtype, call.problem, call.scratch_elements);
    require(recorded.has_value(), "XLA updates a node that was not recorded here");
    const std::vector<cuda::GraphNode> nodes = cuda::graph_nodes(*recorded, call.problem);
    require(static_cast<int64_t>(nodes.size()) <= frame.capacity, "XLA takes fewer kernels than the call needs");
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
      // The first kernel depends on the nodes that XLA names, each next one on the kernel before it.
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

}  // namespace

// JAX's plugin for CUDA (0.11.2) registers all handlers of a target but `record`, so `record` has to be registered
// through XLA's own API. XLA passes a pointer to that API when it queries a handler's metadata: hence this handler, of
// a target that no program calls.
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
    // No handler to initialize: XLA would call it in every run, which takes a microsecond. The first call of a kind
    // finds its kernels when it is recorded, or without a graph when it is launched.
    args.execute = handlers().forward_cuda;
    args.record = record_forward_cuda;
    if (XLA_FFI_Error* error = api.XLA_FFI_Handler_Register(reinterpret_cast<XLA_FFI_Handler_Register_Args*>(&args))) {
      return error;
    }
  }
  return handlers().forward_cuda(call_frame);
}

}  // namespace jax_flash
