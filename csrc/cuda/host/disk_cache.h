// Cubins on disk: the user's cache, and folders of kernels that were built ahead of time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace jax_flash::cuda {

// 128-bit FNV-1a: names files and detects damage. It is no protection against tampering: that is the check of the
// cache's folder.
class Hash {
 public:
  Hash& add(const std::string& text);
  std::string hex() const;  // 32 digits

 private:
  using Wide = unsigned __int128;
  Wide state_ = (Wide{0x6c62272e07bb0142} << 64) + 0x62b821756295c58d;
};

// The name of an entry: readable, short enough for any file system, and unique by the key.
std::string entry_name(const std::string& variant, const std::string& key);
// The cubin of an entry's content; nothing if it is damaged or of another key.
std::optional<std::string> cubin_in(const std::string& entry, const std::string& key);

// An open folder: reads and writes go to the folder that was checked, even if its path is replaced afterwards.
class KernelFolder {
 public:
  // A folder of kernels that were built ahead of time, used without checks. A missing folder has no entries.
  static KernelFolder trusted(const std::string& path, bool make);
  // The user's cache. It is refused if users who are not trusted could write a kernel into it.
  static KernelFolder cache(bool make);

  KernelFolder(KernelFolder&& other) noexcept;
  KernelFolder(const KernelFolder&) = delete;
  KernelFolder& operator=(const KernelFolder&) = delete;
  ~KernelFolder();

  bool usable() const { return descriptor_ >= 0; }
  const std::string& path() const {
    return path_;
  }  // empty: the cache is switched off, or no folder could be determined
  // Why the folder can't be used; empty if it can, does not exist yet, or is switched off.
  const std::string& problem() const { return problem_; }
  // Whether the folder exists and is accessible, but is refused.
  bool refused() const { return refused_; }

  // The cubin of a variant; nothing if there is none, or it is damaged or belongs to a user who is not trusted.
  std::optional<std::string> read(const std::string& variant, const std::string& key) const;
  // Stores an entry by renaming a finished file: readers see all of it or nothing, and losing a race is fine. Returns
  // the file's path; nothing if it can't be written. Afterwards the cache evicts the least recently used entries, down
  // to its limit.
  std::optional<std::string> write(const std::string& variant, const std::string& key, const std::string& cubin) const;

  struct Removed {
    int64_t files, bytes;
  };
  // Removes all kernels. Throws std::runtime_error if one can't be removed.
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

// The path of the cache, whether it exists or not; empty if none can be determined, or it is switched off.
std::string cache_path();

}  // namespace jax_flash::cuda
