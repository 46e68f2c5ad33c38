// From what XLA hands a handler to the problem that a kernel reads: checked, so that whoever gets it need not.
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

// Of a dense [batch, heads, rows, columns] array; 0 where a dimension of size 1 is broadcast.
Strides strides(const std::vector<int64_t>& sizes);

// Where `record` has the field `name`; nullptr where it has none of that name.
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
// On CPUs the backward takes (dlse, out) instead of delta. How large the scratch is was said when the call was lowered,
// maybe for another machine, and where there is none none was wanted: what a call needs of it is for the platform to
// say.
Call decode(Platform platform, Pass pass, const Options& options, ffi::RemainingArgs args, ffi::RemainingRets rets);

void require(bool condition, const std::string& what);

// What `body` throws, as XLA's errors: the user's as InvalidArgument.
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
