// Cubins on disk: the user's cache, and folders of kernels that were built ahead of time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace jax_flash::cuda {

// 128-bit FNV-1a: names files and finds damage. It keeps nobody out: that is what the checks of the cache's folder do.
class Hash {
 public:
  Hash& add(const std::string& text);
  std::string hex() const;  // 32 digits

 private:
  using Wide = unsigned __int128;
  Wide state_ = (Wide{0x6c62272e07bb0142} << 64) + 0x62b821756295c58d;
};

// A folder that is open: what was checked is what is read and written, whatever its name comes to mean.
class KernelFolder {
 public:
  // A folder that is used as it is: one of kernels that were built ahead of time. A folder that is not there has no
  // entries.
  static KernelFolder trusted(const std::string& path, bool make);
  // The user's cache, used if users that could plant a kernel there can't write into it.
  static KernelFolder cache(bool make);

  KernelFolder(KernelFolder&& other) noexcept;
  KernelFolder(const KernelFolder&) = delete;
  KernelFolder& operator=(const KernelFolder&) = delete;
  ~KernelFolder();

  bool usable() const { return descriptor_ >= 0; }
  const std::string& path() const { return path_; }  // empty: the cache is switched off, or has no place
  // Why the folder can't be used; empty where it can, is not there yet, or is switched off.
  const std::string& problem() const { return problem_; }
  // Whether the folder is there and could be used, but is refused.
  bool refused() const { return refused_; }

  // The cubin of a variant; nothing where there is none, or a damaged one, or one of a user who is not trusted.
  std::optional<std::string> read(const std::string& variant, const std::string& key) const;
  // A finished file is renamed into place: readers see all of it or nothing, and losing a race is fine. Returns the
  // file's path; nothing where it can't be written. The cache then gives up what was not used for longest, down to its
  // limit.
  std::optional<std::string> write(const std::string& variant, const std::string& key, const std::string& cubin) const;

  struct Removed {
    int64_t files, bytes;
  };
  // Removes all kernels. Throws std::runtime_error where one can't be.
  Removed clear() const;

 private:
  explicit KernelFolder(std::string path) : path_(std::move(path)) {}
  void open(bool make);
  void shrink(const std::string& newest) const;

  std::string path_;
  std::string problem_;
  int descriptor_ = -1;
  bool refused_ = false;
  bool is_cache_ = false;
  bool checks_owners_ = false;
  unsigned owner_ = 0;  // of the folder
  int64_t limit_ = 0;   // bytes; 0: none
};

// The folder of the cache, whether it is there or not; empty where there is no place for one, or it is switched off.
std::string cache_path();

}  // namespace jax_flash::cuda
