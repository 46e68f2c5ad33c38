// The call of a study kernel (cuda/study): jax_flash/study/kernels.py says which, and with what.
#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/host/cuda.h"
#include "ffi/decode.h"
#include "ffi/handlers.h"
#include "study.h"

namespace jax_flash {
namespace {

Study decode_study(int32_t batch, int32_t rows, int32_t keys, int32_t heads, int32_t kv_heads, float scale,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Study study{{}, batch, rows, keys, heads, kv_heads, scale};
  require(args.size() + rets.size() <= kStudyArrays, "a study kernel has at most 12 arrays");
  for (size_t i = 0; i < args.size(); ++i) study.arrays[i] = argument(args, i).untyped_data();
  for (size_t i = 0; i < rets.size(); ++i) study.arrays[args.size() + i] = result(rets, i).untyped_data();
  return study;
}

cuda::StudyKernel kernel_of(std::string_view file, std::string_view entry, std::string_view constants) {
  return {std::string(file), std::string(entry), std::string(constants)};
}

// XLA calls a handler of every stage with all attributes, so that both have the same parameters.
ffi::Error prepare(int32_t device, std::string_view file, std::string_view entry, std::string_view constants, int32_t,
                   int32_t, int32_t, int32_t, int32_t, int32_t, float, ffi::RemainingArgs, ffi::RemainingRets) {
  return guarded([&] { cuda::prepare_study(device, kernel_of(file, entry, constants)); });
}

ffi::Error run(cuda::Stream stream, int32_t device, std::string_view file, std::string_view entry,
               std::string_view constants, int32_t blocks, int32_t batch, int32_t rows, int32_t keys, int32_t heads,
               int32_t kv_heads, float scale, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    cuda::launch_study(device, stream, kernel_of(file, entry, constants), narrow(blocks, "blocks"),
                       decode_study(batch, rows, keys, heads, kv_heads, scale, args, rets));
  });
}

#define JAX_FLASH_STUDY_ATTRIBUTES         \
  Attr<std::string_view>("file")           \
      .Attr<std::string_view>("entry")     \
      .Attr<std::string_view>("constants") \
      .Attr<int32_t>("blocks")             \
      .Attr<int32_t>("batch")              \
      .Attr<int32_t>("rows")               \
      .Attr<int32_t>("keys")               \
      .Attr<int32_t>("heads")              \
      .Attr<int32_t>("kv_heads")           \
      .Attr<float>("scale")                \
      .RemainingArgs()                     \
      .RemainingRets()

XLA_FFI_DEFINE_HANDLER(
    kPrepare, prepare,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>().JAX_FLASH_STUDY_ATTRIBUTES);
XLA_FFI_DEFINE_HANDLER(
    kRun, run,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>().Ctx<ffi::DeviceOrdinal>().JAX_FLASH_STUDY_ATTRIBUTES,
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

StudyHandlers study_handlers() { return {kPrepare, kRun}; }

}  // namespace jax_flash
