// What the parts of the emulator on the host's side share.
#pragma once

#include <functional>
#include <string>

namespace emulator {

// What a tensor map holds here.
struct Map {
  static constexpr unsigned long long kMark = 0x6d61702d666f7572;
  unsigned long long mark;
  void* data;
  unsigned long long sizes[4];
  unsigned long long strides[3];  // bytes
  unsigned box[4];
};
static_assert(sizeof(Map) <= 128);

// Runs one block; returns what is wrong, or nothing.
std::string run_block(unsigned index, unsigned blocks, unsigned threads, unsigned shared_bytes, unsigned seed,
                      const std::function<void()>& body);

// The places, a line each, where threads have waited for each other or told each other to go on; and leaves one of them
// off, or none.
std::string waits();
void forget();
void omit(const std::string& wait);

}  // namespace emulator
