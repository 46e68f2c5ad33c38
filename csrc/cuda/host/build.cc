// What works without a call: ahead-of-time builds of kernels, and the status that the command line shows.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>
#include <thread>

#include "cuda/host/cuda.h"
#include "cuda/host/disk_cache.h"
#include "cuda/host/driver.h"
#include "cuda/host/family.h"
#include "cuda/host/jit.h"
#include "cuda/host/plan.h"
#include "cuda/tiles.h"

namespace jax_flash::cuda {

Status status() {
  Status status;
  std::string error;
  for (const Nvrtc& nvrtc : nvrtcs(&error)) status.nvrtc.push_back(nvrtc.version() + " (" + nvrtc.path() + ")");
  status.nvrtc_error = error;
  const KernelFolder cache = KernelFolder::cache(true);
  if (cache.usable()) status.cache_dir = cache.path();
  status.cache_problem = cache.problem();
  try {
    const Driver& driver = Driver::get();
    const int version = driver.version();
    status.driver = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    for (int i = 0; i < driver.device_count(); ++i) {
      const int arch = driver.compute_capability(i);
      const Family* family = family_of(arch);
      status.devices.push_back({driver.device_name(i), arch, family ? family->name : ""});
    }
  } catch (const std::runtime_error& e) {
    status.driver_error = e.what();
  }
  return status;
}

std::string fetch(int arch, Pass pass, DType dtype, int head_dim, int value_head_dim, const Options& options,
                  const std::string& gpu) {
  return fetch(variant_of(served_family(arch), arch, pass, dtype, head_dim, value_head_dim, options, 0, gpu)).origin;
}

Kernel build_row(int arch, Pass pass, DType dtype, int head_dim, const Options& options, const TileRow& row,
                 const std::string& out_dir) {
  Variant variant = variant_of(served_family(arch), arch, pass, dtype, head_dim, head_dim, options);
  variant.set_tuned(row);
  return build(variant, out_dir);
}

namespace {

// Every combination that has a kernel; `gpu` as in variant_of().
std::vector<Variant> variants_of(const Family& family, int arch, const Variants& wanted, const std::string& gpu) {
  std::vector<Variant> variants;
  auto add_once = [&](const Variant& variant) {
    auto same = [&](const Variant& other) { return other.name() == variant.name(); };
    if (std::none_of(variants.begin(), variants.end(), same)) variants.push_back(variant);
  };
  for (Pass pass : wanted.passes) {
    for (DType dtype : wanted.dtypes) {
      for (const auto& head_dims : wanted.head_dims) {
        const int head_dim = head_dims.first, value_head_dim = head_dims.second;  // clang 15 captures no bindings
        for (const Options& record : wanted.options) {
          const int largest = std::max(head_dim, value_head_dim), limbs = record.highest_precision ? 2 : 1;
          if (pass == Pass::backward_dq && !separate_dq(family, record, largest)) continue;
          if (pass == Pass::backward_bias && !(record.separate_dq && record.has_dbias)) continue;
          if (pass == Pass::scale) {
            if (record.has_descale) add_once(scale_variant(family, arch, record, largest));
            continue;
          }
          auto add = [&](int rows) {
            variants.push_back(variant_of(family, arch, pass, dtype, head_dim, value_head_dim, record, rows, gpu));
          };
          if (pass == Pass::forward_single_tile && !serves_single_tile(family, arch, record, head_dim, value_head_dim))
            continue;
          const Family& of = pass_family(family, arch, limbs, pass, largest);
          if (pass != Pass::forward_split_kv) {
            add(0);
            if (pass == Pass::forward && largest <= of.short_blocks && is_plain(record)) add(kShortRows);
            if (pass == Pass::backward && largest <= of.tall_tiles && has_tall_tiles(record, head_dim)) add(kTallRows);
            continue;
          }
          for (int rows : kSplitKvRows) {
            if (find_tile_row(of.name, limbs, pass, largest, arch, calls_of(record), rows)) add(rows);
          }
        }
      }
    }
  }
  return variants;
}

// Calls task(0) to task(count - 1) on all cores: NVRTC compiles different programs at the same time.
template <typename Task>
void on_all_cores(size_t count, Task task) {
  std::vector<std::future<void>> workers;
  std::atomic<size_t> next{0};
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    workers.push_back(std::async(std::launch::async, [&] {
      for (size_t mine; (mine = next++) < count;) task(mine);
    }));
  }
  for (std::future<void>& worker : workers) worker.wait();
  for (std::future<void>& worker : workers) worker.get();
}

}  // namespace

std::vector<Kernel> build(int arch, const Variants& wanted, const std::string& out_dir, const std::string& forced) {
  const Family& family = forced.empty() ? served_family(arch) : *family_of(arch, forced, "family");
  const std::vector<Variant> variants = variants_of(family, arch, wanted, "");
  std::vector<Kernel> kernels(variants.size());
  on_all_cores(variants.size(), [&](size_t i) { kernels[i] = build(variants[i], out_dir); });
  return kernels;
}

std::vector<std::string> names(int arch, const Variants& wanted) {
  std::vector<std::string> names;
  for (const Variant& variant : variants_of(served_family(arch), arch, wanted, "")) names.push_back(variant.name());
  return names;
}

std::vector<Origin> fetch(int arch, const Variants& wanted, const std::string& gpu) {
  // As calls on that GPU choose it: JAX_FLASH_CUDA_FAMILY and the rows that `bench tune` stored for it apply.
  const Family* family = family_of(arch);
  const std::vector<Variant> variants = variants_of(family ? *family : served_family(arch), arch, wanted, gpu);
  std::vector<Origin> origins(variants.size());
  on_all_cores(variants.size(), [&](size_t i) {
    const auto began = std::chrono::steady_clock::now();
    const std::string origin = fetch(variants[i]).origin;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    origins[i] = {variants[i].name(), origin, took.count()};
  });
  return origins;
}

}  // namespace jax_flash::cuda
