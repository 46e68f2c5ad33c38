// The handlers that XLA calls. They are stateless. Both platforms share the decoding; what differs is the context they
// get from XLA.
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

// Registers, when XLA asks it what it can do, a forward that says which kernels go into XLA's CUDA graphs; then runs as
// forward_cuda does.
XLA_FFI_Error* register_forward_cuda(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_flash
