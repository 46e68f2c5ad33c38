// Runs items on XLA's thread pool.
#pragma once

#include <cstdint>
#include <functional>

#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// Runs items on at most `threads` threads of XLA's pool. The handler itself occupies a pool thread, so it must never
// wait for a helper to be scheduled: the caller works too, and waits only for items that some running thread has taken.
// Otherwise concurrent calls on a small pool (six on two threads) deadlock.
// A waiting thread spins for a while before it sleeps, since to sleep takes longer than most waits.
void run_on_pool(xla::ffi::ThreadPool& pool, int64_t items, int64_t threads, const std::function<void(int64_t)>& body);

}  // namespace jax_flash
