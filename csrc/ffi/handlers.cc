#include "ffi/handlers.h"

#include <functional>
#include <stdexcept>
#include <string>

#include "cpu/cpu.h"
#include "cuda/host/cuda.h"
#include "ffi/decode.h"
#include "ffi/options.h"
#include "ffi/thread_pool.h"

namespace jax_flash {
namespace {

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
      if (call.scratch_elements < wanted) {
        throw std::invalid_argument("scratch must have at least " + std::to_string(wanted) + " elements, got " +
                                    std::to_string(call.scratch_elements));
      }
      cpu::backward(call.dtype, call.problem, pool.num_threads(), parallel_for);
    }
  });
}

template <Pass pass>
ffi::Error prepare_cuda(int32_t device, Options options, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    Call call = decode(Platform::cuda, pass, options, args, rets);
    cuda::prepare(device, pass, call.dtype, call.problem, call.scratch_elements);
  });
}

template <Pass pass>
ffi::Error run_cuda(cuda::Stream stream, int32_t device, Options options, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  return guarded([&] {
    Call call = decode(Platform::cuda, pass, options, args, rets);
    cuda::launch(device, stream, pass, call.dtype, call.problem, call.scratch_elements);
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

}  // namespace

Handlers handlers() {
  return {kForwardCpu, kBackwardCpu, kForwardCudaPrepare, kBackwardCudaPrepare, kForwardCuda, kBackwardCuda};
}

}  // namespace jax_flash
