#include "cuda/host/disk_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

namespace jax_flash::cuda {
namespace fs = std::filesystem;
namespace {

std::string last_error() { return std::generic_category().message(errno); }

// A stored cubin ends in a line with a hash, which shows that it is complete. Tools for cubins ignore that line.
constexpr char kMark[] = "\njax_flash cubin ";

std::string trailer(const std::string& key, const std::string& cubin) {
  return kMark + key + " " + Hash().add(cubin).hex() + "\n";
}

constexpr char kSuffix[] = ".cubin", kTemporary[] = ".tmp";
constexpr size_t kKeyDigits = 16;

// File systems take names of 255 bytes, encrypted ones of 143, and a temporary name is up to 26 longer than an entry's.
// So a variant's name is cut to this length, but keeps its "-sm_80" at the end; the key tells entries apart.
constexpr size_t kLongestVariant = 90;

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Whether entry_name() could have made this name; other files of a folder are left alone.
bool is_entry(const std::string& name) {
  const std::string suffix = kSuffix;
  if (!ends_with(name, suffix) || name.size() < suffix.size() + kKeyDigits + 1) return false;
  const size_t digits = name.size() - suffix.size() - kKeyDigits;
  return name[digits - 1] == '-' && name.find("-sm_") != std::string::npos &&
         name.find_first_not_of("0123456789abcdef", digits) == name.size() - suffix.size();
}

// Whether this is a temporary file: an entry that a process is writing, or has left unfinished.
bool is_temporary(const std::string& name) {
  const size_t end = name.rfind(kSuffix);
  return ends_with(name, kTemporary) && end != std::string::npos && is_entry(name.substr(0, end + sizeof(kSuffix) - 1));
}

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  explicit operator bool() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

std::optional<std::string> content_of(int file, size_t size) {
  std::string content(size, '\0');
  for (size_t done = 0; done < size;) {
    const ssize_t count = ::read(file, content.data() + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    done += count;
  }
  return content;
}

bool write_all(int file, const std::string& content) {
  for (size_t done = 0; done < content.size();) {
    const ssize_t count = ::write(file, content.data() + done, content.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    done += count;
  }
  return true;
}

struct Entry {
  std::string name;
  int64_t bytes;
  timespec used;

  bool operator<(const Entry& other) const {
    return std::tie(used.tv_sec, used.tv_nsec) < std::tie(other.used.tv_sec, other.used.tv_nsec);
  }
};

timespec used_at(const struct stat& status) {
#if defined(__APPLE__)
  return status.st_mtimespec;
#else
  return status.st_mtim;
#endif
}

// The regular files of a folder whose names satisfy `wanted`.
template <typename Wanted>
std::vector<Entry> entries_of(int folder, Wanted wanted) {
  std::vector<Entry> found;
  const int again = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* listing = again < 0 ? nullptr : fdopendir(again);
  if (!listing) {
    if (again >= 0) close(again);
    return found;
  }
  while (const dirent* entry = readdir(listing)) {
    struct stat status;
    if (!wanted(std::string(entry->d_name)) || fstatat(folder, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(status.st_mode)) {
      continue;
    }
    found.push_back({entry->d_name, status.st_size, used_at(status)});
  }
  closedir(listing);
  return found;
}

// Makes a folder and its missing parents, with access for their owner only.
bool make_folders(const fs::path& path) {
  if (mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return true;
  if (errno != ENOENT || !path.has_parent_path() || path.parent_path() == path) return false;
  return make_folders(path.parent_path()) && (mkdir(path.c_str(), 0700) == 0 || errno == EEXIST);
}

constexpr int64_t kDefaultLimit = 1024;  // MiB

// The limit in bytes, 0 for no limit; nothing if the variable is not a valid limit.
std::optional<int64_t> limit_of(const char* text) {
  int64_t mebibytes = kDefaultLimit;
  if (text && *text) {
    const char* end = text + std::strlen(text);
    const auto [stop, error] = std::from_chars(text, end, mebibytes);
    if (error != std::errc() || stop != end || mebibytes < 0 || mebibytes >= int64_t{1} << 40) return std::nullopt;
  }
  return mebibytes << 20;
}

}  // namespace

std::string entry_name(const std::string& variant, const std::string& key) {
  std::string readable = variant;
  if (readable.size() > kLongestVariant) {
    const std::string target = readable.substr(readable.rfind('-'));
    readable = readable.substr(0, kLongestVariant - target.size() - 1) + "~" + target;
  }
  return readable + "-" + key.substr(0, kKeyDigits) + kSuffix;
}

std::optional<std::string> cubin_in(const std::string& entry, const std::string& key) {
  const size_t length = trailer(key, "").size();
  if (entry.size() < length) return std::nullopt;
  std::string cubin = entry.substr(0, entry.size() - length);
  if (entry.compare(cubin.size(), length, trailer(key, cubin)) != 0) return std::nullopt;
  return cubin;
}

Hash& Hash::add(const std::string& text) {
  constexpr Wide kPrime = (Wide{1} << 88) + 0x13b;
  for (unsigned char c : text) state_ = (state_ ^ c) * kPrime;
  state_ = (state_ ^ 0x100) * kPrime;  // so that "ab", "c" differs from "a", "bc"
  return *this;
}

std::string Hash::hex() const {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(state_ >> 64),
                static_cast<unsigned long long>(state_));
  return text;
}

std::string cache_path() {
  fs::path dir;
  if (const char* own = std::getenv("JAX_FLASH_CACHE_DIR")) {
    dir = own;
  } else if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg && *xdg) {
    dir = fs::path(xdg) / "jax_flash";
  } else if (const char* home = std::getenv("HOME"); home && *home) {
    dir = fs::path(home) / ".cache" / "jax_flash";
  }
  return dir.string();
}

KernelFolder::KernelFolder(KernelFolder&& other) noexcept
    : path_(std::move(other.path_)),
      problem_(std::move(other.problem_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      refused_(other.refused_),
      is_cache_(other.is_cache_),
      checks_owners_(other.checks_owners_),
      owner_(other.owner_),
      limit_(other.limit_) {}

KernelFolder::~KernelFolder() {
  if (descriptor_ >= 0) close(descriptor_);
}

void KernelFolder::open(bool make) {
  if (make && !make_folders(path_)) {
    problem_ = path_ + " can't be made: " + last_error();
    return;
  }
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor_ < 0 && errno != ENOENT) problem_ = path_ + " can't be opened: " + last_error();
}

KernelFolder KernelFolder::trusted(const std::string& path, bool make) {
  KernelFolder folder(path);
  folder.open(make);
  return folder;
}

KernelFolder KernelFolder::cache(bool make) {
  KernelFolder folder(cache_path());
  if (folder.path_.empty()) return folder;
  folder.is_cache_ = true;
  auto refuse = [&](const std::string& why) {
    folder.problem_ = why;
    folder.refused_ = true;
    if (folder.descriptor_ >= 0) close(std::exchange(folder.descriptor_, -1));
  };
  const char* wanted = std::getenv("JAX_FLASH_CACHE_LIMIT");
  const auto limit = limit_of(wanted);
  if (!limit) {
    refuse(std::string("JAX_FLASH_CACHE_LIMIT must be a number of MiB, or 0 for no limit, got ") + wanted);
    return folder;
  }
  folder.limit_ = *limit;
  folder.open(make);
  struct stat status{};
  if (!folder.usable() || fstat(folder.descriptor_, &status) != 0) return folder;
  folder.owner_ = status.st_uid;

  const char* shared = std::getenv("JAX_FLASH_CACHE_SHARED");
  folder.checks_owners_ = !shared || std::string(shared) != "1";
  if (!folder.checks_owners_) return folder;
  const std::string remedy =
      "set JAX_FLASH_CACHE_DIR to a folder of your own, or JAX_FLASH_CACHE_SHARED=1 if you trust all who can write "
      "there";
  if (status.st_mode & S_IWOTH) {
    refuse(folder.path_ + " can be written by every user: take that from them (chmod o-w), " + remedy);
  } else if (status.st_uid != geteuid() && status.st_uid != 0) {
    refuse(folder.path_ + " belongs to user " + std::to_string(status.st_uid) + ", who is neither this one (" +
           std::to_string(geteuid()) + ") nor root: " + remedy);
  }
  return folder;
}

std::optional<std::string> KernelFolder::read(const std::string& variant, const std::string& key) const {
  if (!usable()) return std::nullopt;
  // A package's files may be links. Entries of the cache are made by its users as regular files, so links are refused
  // there; and O_NONBLOCK keeps open() from waiting on a pipe.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (is_cache_ ? O_NOFOLLOW : 0);
  const File file(openat(descriptor_, entry_name(variant, key).c_str(), flags));
  struct stat status;
  if (!file || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  if (checks_owners_ &&
      ((status.st_mode & S_IWOTH) || (status.st_uid != geteuid() && status.st_uid != 0 && status.st_uid != owner_))) {
    return std::nullopt;
  }
  const std::optional<std::string> content = content_of(file.get(), status.st_size);
  if (!content) return std::nullopt;
  std::optional<std::string> cubin = cubin_in(*content, key);
  if (!cubin) return std::nullopt;
  // The time of last use is kept to the hour, so that many processes that start at once write little.
  constexpr time_t kHour = 3600;
  if (is_cache_ && std::time(nullptr) - used_at(status).tv_sec > kHour) futimens(file.get(), nullptr);
  return cubin;
}

std::optional<std::string> KernelFolder::write(const std::string& variant, const std::string& key,
                                               const std::string& cubin) const {
  if (!usable()) return std::nullopt;
  static std::atomic<unsigned> counter{std::random_device{}()};
  const std::string name = entry_name(variant, key),
                    temporary = name + "." + std::to_string(getpid()) + "." + std::to_string(counter++) + kTemporary;
  bool whole = false;
  {
    // O_EXCL: never write to a file or through a link that somebody else has put there.
    const int descriptor =
        openat(descriptor_, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (descriptor < 0) return std::nullopt;
    whole = write_all(descriptor, cubin + trailer(key, cubin));
    whole = close(descriptor) == 0 && whole;
  }
  if (!whole || renameat(descriptor_, temporary.c_str(), descriptor_, name.c_str()) != 0) {
    unlinkat(descriptor_, temporary.c_str(), 0);
    return std::nullopt;
  }
  if (is_cache_) shrink(name);
  return (fs::path(path_) / name).string();
}

void KernelFolder::shrink(const std::string& newest) const {
  constexpr time_t kAbandoned = 3600;  // no process takes an hour to write an entry
  const time_t now = std::time(nullptr);
  for (const Entry& entry : entries_of(descriptor_, is_temporary)) {
    if (now - entry.used.tv_sec > kAbandoned) unlinkat(descriptor_, entry.name.c_str(), 0);
  }
  if (!limit_) return;
  std::vector<Entry> entries = entries_of(descriptor_, is_entry);
  int64_t bytes = 0;
  for (const Entry& entry : entries) bytes += entry.bytes;
  if (bytes <= limit_) return;
  std::sort(entries.begin(), entries.end());
  for (const Entry& entry : entries) {
    if (bytes <= limit_) return;
    if (entry.name == newest) continue;
    // Another process may have used, replaced or removed it meanwhile. A process that has it open can still read it.
    struct stat status;
    if (fstatat(descriptor_, entry.name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) bytes -= entry.bytes;
      continue;
    }
    const timespec used = used_at(status);
    if (used.tv_sec != entry.used.tv_sec || used.tv_nsec != entry.used.tv_nsec) continue;
    if (unlinkat(descriptor_, entry.name.c_str(), 0) == 0 || errno == ENOENT) bytes -= entry.bytes;
  }
}

KernelFolder::Removed KernelFolder::clear() const {
  Removed removed{0, 0};
  if (!usable()) return removed;
  for (const Entry& entry :
       entries_of(descriptor_, [](const std::string& x) { return is_entry(x) || is_temporary(x); })) {
    if (unlinkat(descriptor_, entry.name.c_str(), 0) == 0) {
      removed.files += is_entry(entry.name);
      removed.bytes += entry.bytes;
    } else if (errno != ENOENT) {
      throw std::runtime_error("can't remove " + (fs::path(path_) / entry.name).string() + ": " + last_error());
    }
  }
  return removed;
}

}  // namespace jax_flash::cuda
