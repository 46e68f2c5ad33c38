// Decodes the buffers and attributes of an XLA call into the Problem that a kernel reads, and validates them, so that
// nothing downstream has to.
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

namespace ffi = xla::ffi;

struct Call {
  DType dtype;
  Problem problem;
  int64_t scratch_elements;  // of problem.scratch
};

// Arrays of two limbs have the columns of both.
int limbs_of(const Options& options);

// The strides of a dense [batch, heads, rows, columns] array; 0 where a dimension of size 1 is broadcast.
Strides strides(const std::vector<int64_t>& sizes);

// The field `name` of `record`; nullptr if it has none of that name.
#define JAX_FLASH_FIND(record, name)      \
  [](auto& r) {                           \
    if constexpr (requires { r.name; }) { \
      return &r.name;                     \
    } else {                              \
      return nullptr;                     \
    }                                     \
  }(record)

enum class Platform { cpu, cuda };

// forward:  (q, k, v, operands...) -> (out, lse[, scratch])
// backward: (q, k, v, dout, lse, delta, operands...) -> (dq, dk, dv, gradients of operands...[, scratch])
// On CPUs the backward takes (dlse, out) instead of delta. The size of the scratch was fixed when the call was lowered,
// maybe for another machine, so each platform checks that it suffices; a call that wanted none has none.
Call decode(Platform platform, Pass pass, const Options& options, ffi::RemainingArgs args, ffi::RemainingRets rets);

// These throw std::invalid_argument.
void require(bool condition, const std::string& what);
void require_count(size_t expected, size_t got, const char* what);
int narrow(int64_t value, const char* what);  // a size of 1 at least

// Buffers of a call by their index.
ffi::AnyBuffer argument(ffi::RemainingArgs args, size_t index);
ffi::AnyBuffer result(ffi::RemainingRets rets, size_t index);

using Sizes = ffi::Span<const int64_t>;
// With `broadcast`, any dimension may have size 1 instead.
void check(const ffi::AnyBuffer& buffer, ffi::DataType type, Sizes sizes, const char* name, bool broadcast = false);

// Turns what `body` throws into XLA's errors, std::invalid_argument into InvalidArgument.
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

}  // namespace jax_flash
