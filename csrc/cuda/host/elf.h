// Reads a kernel's traits from a cubin, which is a 64-bit ELF file.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace jax_flash::cuda {

class Elf {
 public:
  explicit Elf(std::string_view file) : file_(file) {
    if (file.substr(0, 4) != "\177ELF" || file.size() < 64 || file[4] != 2) throw std::runtime_error("not a cubin");
    sections_ = at<uint64_t>(40);
    section_size_ = at<uint16_t>(58);
    section_count_ = at<uint16_t>(60);
  }

  // The initial value of a constant.
  template <typename T>
  T constant(std::string_view name) const {
    for (int i = 0; i < section_count_; ++i) {
      if (field<uint32_t>(i, 4) != 2) continue;  // SHT_SYMTAB
      const uint64_t start = field<uint64_t>(i, 24), size = field<uint64_t>(i, 32);
      const int strings = static_cast<int>(field<uint32_t>(i, 40));
      for (uint64_t symbol = start; symbol + 24 <= start + size; symbol += 24) {
        if (text(strings, at<uint32_t>(symbol)) != name) continue;
        const int section = at<uint16_t>(symbol + 6);
        return at<T>(field<uint64_t>(section, 24) + at<uint64_t>(symbol + 8));
      }
    }
    throw std::runtime_error("the cubin lacks " + std::string(name));
  }

 private:
  template <typename T>
  T at(uint64_t offset) const {
    if (offset > file_.size() || file_.size() - offset < sizeof(T)) throw std::runtime_error("the cubin is cut short");
    T value;
    std::memcpy(&value, file_.data() + offset, sizeof(T));
    return value;
  }
  template <typename T>
  T field(int section, int offset) const {
    return at<T>(sections_ + static_cast<uint64_t>(section) * section_size_ + offset);
  }
  std::string_view text(int section, uint32_t offset) const {
    const uint64_t start = field<uint64_t>(section, 24) + offset;
    if (start >= file_.size()) throw std::runtime_error("the cubin is cut short");
    const size_t end = file_.find('\0', start);
    return file_.substr(start, end == std::string_view::npos ? end : end - start);
  }

  std::string_view file_;
  uint64_t sections_;
  int section_size_, section_count_;
};

}  // namespace jax_flash::cuda
