// The kernels of one instruction set. Compiled once per set, with its flags and with JAX_FLASH_ISA its name.
//
// Code compiled for AVX-512 must never run on a processor without it. Inline functions and template instances of the
// standard library could make that happen: they are weak symbols of one name in every object, of which the linker keeps
// any one. g++ compiles these objects with -fno-weak, which makes such functions local to the object. clang has no such
// flag; it inlines all of them that are called here. Our own functions have the instruction set in their names. The
// build checks that no other one is global (check_symbols.cmake).
#include <type_traits>

#include "backward.h"
#include "backward_decoding.h"
#include "backward_options.h"
#include "backward_pairs.h"
#include "backward_panels.h"
#include "backward_rows.h"
#include "forward.h"
#include "forward_decoding.h"
#include "forward_options.h"
#include "forward_panels.h"
#include "isa.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {
namespace {

template <typename Body>
auto with_element(DType dtype, Body body) {
#if defined(JAX_FLASH_PAIRS)
  static_cast<void>(dtype);
  return body(std::type_identity<BFloat16>{});
#else
  switch (dtype) {
    case DType::f16: return body(std::type_identity<Half>{});
    case DType::bf16: return body(std::type_identity<BFloat16>{});
    case DType::f32: return body(std::type_identity<float>{});
    default: return body(std::type_identity<double>{});
  }
#endif
}

template <typename Type>
using Element = typename Type::type;

size_t forward_workspace(DType dtype, const Problem& p, const ForwardPlan& plan) {
  return with_element(dtype, [&](auto e) { return ForwardItem<Element<decltype(e)>>(p, plan, nullptr).workspace(); });
}

size_t forward_partial(DType dtype, const Problem& p, const ForwardPlan& plan) {
  return with_element(dtype, [&](auto e) {
    using E = Element<decltype(e)>;
    return ForwardItem<E>(p, plan, nullptr).record_size() * sizeof(Compute<E>);
  });
}

void forward(DType dtype, const Problem& p, const ForwardPlan& plan, int64_t item, void* workspace, void* partials) {
  with_element(dtype, [&](auto e) { ForwardItem<Element<decltype(e)>>(p, plan, workspace).run(item, partials); });
}

void forward_combine(DType dtype, const Problem& p, const ForwardPlan& plan, int64_t item, void* workspace,
                     const void* partials) {
  with_element(dtype, [&](auto e) { ForwardItem<Element<decltype(e)>>(p, plan, workspace).combine(item, partials); });
}

size_t backward_workspace(DType dtype, const Problem& p, const BackwardPlan& plan) {
  return with_element(dtype, [&](auto e) { return BackwardItem<Element<decltype(e)>>(p, plan, nullptr).workspace(); });
}

int64_t backward_record(DType dtype, const Problem& p) {
  return with_element(dtype, [&](auto e) { return BackwardItem<Element<decltype(e)>>::record_size(p); });
}

void backward_prepare(DType dtype, const Problem& p, const BackwardPlan& plan, int64_t item, void* workspace) {
  with_element(dtype, [&](auto e) { BackwardItem<Element<decltype(e)>>(p, plan, workspace).prepare(item); });
}

void backward(DType dtype, const Problem& p, const BackwardPlan& plan, int64_t item, void* workspace,
              const Turns* turns) {
  with_element(dtype, [&](auto e) { BackwardItem<Element<decltype(e)>>(p, plan, workspace).run(item, turns); });
}

void backward_reduce(DType dtype, const Problem& p, const BackwardPlan& plan, int64_t item, void* workspace) {
  with_element(dtype, [&](auto e) { BackwardItem<Element<decltype(e)>>(p, plan, workspace).reduce(item); });
}

}  // namespace

#define JAX_FLASH_TEXT_OF(x) #x
#define JAX_FLASH_TEXT(x) JAX_FLASH_TEXT_OF(x)
const Kernels kKernels = {JAX_FLASH_TEXT(JAX_FLASH_ISA),
                          forward_workspace,
                          backward_workspace,
                          backward_record,
                          forward_partial,
                          forward,
                          forward_combine,
                          backward_prepare,
                          backward,
                          backward_reduce};

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
