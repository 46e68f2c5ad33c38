#include "ffi/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace jax_flash {

void run_on_pool(xla::ffi::ThreadPool& pool, int64_t items, int64_t threads, const std::function<void(int64_t)>& body) {
  int64_t helpers = std::min<int64_t>({pool.num_threads(), items, threads}) - 1;
  if (helpers <= 0) {
    for (int64_t item = 0; item < items; ++item) body(item);
    return;
  }
  struct Job {
    std::function<void(int64_t)> body;
    int64_t items;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::exception_ptr error;
    std::mutex mutex;
    std::condition_variable finished;

    void work() {
      int64_t mine = 0;
      std::exception_ptr failure;
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items; ++mine) {
        try {
          if (!failure) body(item);
        } catch (...) {
          failure = std::current_exception();
        }
      }
      if (mine == 0) return;
      std::lock_guard<std::mutex> lock(mutex);
      if (failure) error = failure;
      if ((done += mine) == items) finished.notify_all();
    }
  };
  auto job = std::make_shared<Job>();
  job->body = body;
  job->items = items;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->work(); });
  job->work();
  constexpr std::chrono::microseconds kLook{50};
  for (auto begin = std::chrono::steady_clock::now();
       job->done != items && std::chrono::steady_clock::now() - begin < kLook;) {
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(job->mutex);
  job->finished.wait(lock, [&] { return job->done == job->items; });
  if (job->error) std::rethrow_exception(job->error);
}

}  // namespace jax_flash
