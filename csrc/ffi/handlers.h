// The handlers that XLA calls. They are stateless. Both platforms share the decoding and differ in the context that
// they get from XLA.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_flash {

struct Handlers {
  XLA_FFI_Handler* forward_cpu;
  XLA_FFI_Handler* backward_cpu;
  XLA_FFI_Handler* prepare_forward_cuda;  // at initialization, before any CUDA graph is captured
  XLA_FFI_Handler* prepare_backward_cuda;
  XLA_FFI_Handler* forward_cuda;
  XLA_FFI_Handler* backward_cuda;
};
Handlers handlers();

// Those of the call that makes float16 arrays of float32 ones, on CUDA.
struct ScaleHandlers {
  XLA_FFI_Handler* prepare;
  XLA_FFI_Handler* run;
};
ScaleHandlers scale_handlers();

// Those of study kernels (cuda/study), on CUDA.
struct StudyHandlers {
  XLA_FFI_Handler* prepare;
  XLA_FFI_Handler* run;
};
StudyHandlers study_handlers();

// When XLA queries its metadata, registers a forward that records its kernels into XLA's CUDA graphs. Otherwise runs as
// forward_cuda does.
XLA_FFI_Error* register_forward_cuda(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_flash
