// The interface of the CPU kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "../problem.h"

namespace jax_flash::cpu {

// Calls body(item) once for every item in [0, items), from any thread, and returns when all are done. Items are begun
// in their order, for one may wait for those before it. More than `threads` threads would lose more by waking and
// waiting than they save.
using ParallelFor = std::function<void(int64_t items, int64_t threads, const std::function<void(int64_t)>& body)>;

// Elements of float (double for f64) that backward needs in Problem::scratch at least. It depends on dtype, shape and
// options alone: the lowering reads it when a call is traced, maybe on another machine. The instruction set in use may
// need less.
int64_t backward_scratch(DType dtype, const Problem& problem);

// `threads`: how many parallel_for has. Results do not depend on it.
void forward(DType dtype, const Problem& problem, int64_t threads, const ParallelFor& parallel_for);
void backward(DType dtype, const Problem& problem, int64_t threads, const ParallelFor& parallel_for);

// The instruction set in use ("avx512_bf16", "avx512", "avx2", "neon" or "baseline"): the best that this processor has,
// or the one that JAX_FLASH_CPU_ISA names. Throws std::runtime_error when that one is unknown or the processor lacks
// it.
std::string isa();

}  // namespace jax_flash::cpu
