#include "cuda/host/tuned.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace jax_flash::cuda {
namespace {

std::mutex mutex;
std::vector<TunedRow> all;
std::atomic<int64_t> generation{0};

}  // namespace

void tune(std::vector<TunedRow> rows) {
  std::lock_guard<std::mutex> lock(mutex);
  all = std::move(rows);
  ++generation;
}

std::optional<TileRow> tuned_row(const std::string& gpu, const std::string& family, Pass pass, int head_dim) {
  std::lock_guard<std::mutex> lock(mutex);
  for (const TunedRow& tuned : all) {
    if (tuned.gpu == gpu && tuned.family == family && tuned.pass == pass && tuned.head_dim == head_dim) {
      return tuned.row;
    }
  }
  return std::nullopt;
}

int64_t tuned_generation() { return generation; }

}  // namespace jax_flash::cuda
