// What works without a call: ahead-of-time builds of kernels, and the status that the command line shows.

#include <algorithm>
#include <atomic>
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

std::vector<Kernel> build(int arch, const std::vector<DType>& dtypes, const std::vector<std::pair<int, int>>& head_dims,
                          const std::vector<Options>& options, const std::string& out_dir, const std::string& forced,
                          const std::vector<Pass>& passes) {
  const Family& family = forced.empty() ? served_family(arch) : *family_of(arch, forced, "family");
  std::vector<Variant> variants;
  auto add_once = [&](const Variant& variant) {
    auto same = [&](const Variant& other) { return other.name() == variant.name(); };
    if (std::none_of(variants.begin(), variants.end(), same)) variants.push_back(variant);
  };
  for (Pass pass : passes) {
    for (DType dtype : dtypes) {
      for (auto [head_dim, value_head_dim] : head_dims) {
        for (const Options& record : options) {
          const int largest = std::max(head_dim, value_head_dim), limbs = record.highest_precision ? 2 : 1;
          if (pass == Pass::backward_dq && !separate_dq(family, record, largest)) continue;
          if (pass == Pass::backward_bias && !(record.separate_dq && record.has_dbias)) continue;
          if (pass == Pass::scale) {
            if (record.has_descale) add_once(scale_variant(family, arch, record, largest));
            continue;
          }
          auto add = [&](int rows) {
            variants.push_back(variant_of(family, arch, pass, dtype, head_dim, value_head_dim, record, rows));
          };
          if (pass == Pass::forward_single_tile && !serves_single_tile(family, arch, record, head_dim, value_head_dim))
            continue;
          const Family& of = pass_family(family, arch, limbs, pass, largest);
          if (pass != Pass::forward_split_kv) {
            add(0);
            if (pass == Pass::forward && largest <= of.short_blocks && is_plain(record)) add(kShortRows);
            continue;
          }
          for (int rows : kSplitKvRows) {
            if (find_tile_row(of.name, limbs, pass, largest, arch, calls_of(record), rows)) add(rows);
          }
        }
      }
    }
  }
  // NVRTC compiles different programs at the same time.
  std::vector<Kernel> kernels(variants.size());
  std::vector<std::future<void>> workers;
  std::atomic<size_t> next{0};
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    workers.push_back(std::async(std::launch::async, [&] {
      for (size_t mine; (mine = next++) < variants.size();) kernels[mine] = build(variants[mine], out_dir);
    }));
  }
  for (std::future<void>& worker : workers) worker.wait();
  for (std::future<void>& worker : workers) worker.get();
  return kernels;
}

}  // namespace jax_flash::cuda
