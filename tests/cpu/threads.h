// A ParallelFor for the test programs: a given number of threads take items until none is left.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "../../csrc/cpu/cpu.h"

inline jax_flash::cpu::ParallelFor run_on(int threads) {
  return [threads](int64_t items, int64_t, const std::function<void(int64_t)>& body) {
    std::atomic<int64_t> next{0};
    auto work = [&] {
      for (int64_t item; (item = next.fetch_add(1)) < items;) body(item);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads && i < items; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
  };
}
