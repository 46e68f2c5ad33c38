// Loads and launches the study kernels (cuda/study).

#include <map>
#include <mutex>
#include <tuple>

#include "cuda/host/cuda.h"
#include "cuda/host/disk_cache.h"
#include "cuda/host/driver.h"
#include "cuda/host/elf.h"
#include "cuda/host/jit.h"

namespace jax_flash::cuda {
namespace {

struct LoadedStudy {
  CuKernel kernel;
  int shared_bytes;
};

Fetched fetch(const StudyKernel& wanted, int arch) {
  const std::string source = "#include \"problem.h\"\nnamespace jax_flash {\n" + wanted.constants +
                             "}  // namespace jax_flash\n#include \"cuda/study/" + wanted.file + ".cu\"\n";
  return fetch_source("study-" + wanted.file + "-" + Hash().add(wanted.constants).hex(), source, arch);
}

LoadedStudy load(int device, const StudyKernel& wanted) {
  const Driver& driver = Driver::get();
  const std::string cubin = fetch(wanted, driver.compute_capability(device)).cubin;
  const int shared_bytes = Elf(cubin).constant<int>("shared_bytes");
  const CuKernel kernel = driver.kernel(driver.load(cubin), wanted.entry.c_str());
  driver.ready(kernel, device, shared_bytes);
  return {kernel, shared_bytes};
}

const LoadedStudy& find(int device, const StudyKernel& wanted) {
  static std::mutex mutex;
  static std::map<std::tuple<int, std::string, std::string, std::string>, LoadedStudy> all;
  const std::tuple key{device, wanted.file, wanted.entry, wanted.constants};
  std::lock_guard<std::mutex> lock(mutex);
  auto entry = all.find(key);
  if (entry == all.end()) entry = all.emplace(key, load(device, wanted)).first;
  return entry->second;
}

}  // namespace

int study_shared_bytes(int arch, const StudyKernel& kernel) {
  return Elf(fetch(kernel, arch).cubin).constant<int>("shared_bytes");
}

void prepare_study(int device, const StudyKernel& kernel) { find(device, kernel); }

void launch_study(int device, Stream stream, const StudyKernel& wanted, int blocks, const Study& study) {
  const LoadedStudy& found = find(device, wanted);
  const void* const arguments[] = {&study};
  Driver::get().launch(found.kernel, blocks, kStudyThreads, found.shared_bytes, static_cast<CuStream>(stream),
                       arguments);
}

}  // namespace jax_flash::cuda
