// THE field list: every option of attention() once, with its type.
//
// The Python side passes the record by name (`Options` and `OPERANDS` in jax_flash/_attention.py), the FFI handlers
// decode it by name, and the CUDA side prints it as named constants into the kernel's source.
//
//   CONSTANT(type, name)   known when the call is traced; compiled into a CUDA kernel as `option_<name>`
//   VALUE(type, name)      known when the call is traced; read at run time as `problem.options.<name>`
//   OPERAND(type, name)    an optional array: `problem.<name>`, null when absent; a CUDA kernel is compiled with
//                          `has_<name>`. Shape and meaning stand beside the entry.
//
// This header is compiled by the host compiler and by NVRTC, so it includes nothing.
#pragma once

#define JAX_FLASH_OPTIONS(CONSTANT, VALUE, OPERAND)                                       \
  /* keep key position <= query position + q_offset */                                    \
  CONSTANT(bool, causal)                                                                  \
  /* multiplies the scores; finite and > 0 (Python folds sign and zero into the query) */ \
  VALUE(double, scale)                                                                    \
  /* [batch] int32: position of query row 0; absent means 0 */                            \
  OPERAND(int, q_offset)

namespace jax_flash {

#define JAX_FLASH_FIELD(type, name) type name;
#define JAX_FLASH_PRESENCE(type, name) bool has_##name;
struct Options {
  JAX_FLASH_OPTIONS(JAX_FLASH_FIELD, JAX_FLASH_FIELD, JAX_FLASH_PRESENCE)
};
#undef JAX_FLASH_PRESENCE
#undef JAX_FLASH_FIELD

}  // namespace jax_flash
