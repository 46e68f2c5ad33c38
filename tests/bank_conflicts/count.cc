// Runs kernels on the host and counts what their accesses to shared memory cost: for each kernel one line of JSON with
// its access patterns, for each of them warp instructions, wavefronts, and what the wavefronts would be without bank
// conflicts; of the whole run over two tiles, and of one step of the main loop. Stops at a race, or at an access
// outside of SharedStorage or to an address that is no multiple of its width.
//
// The rule: there are 32 banks of 4 bytes, and a wavefront serves any number of lanes as long as none of the banks has
// to give two different words. An access of 4 bytes tries to serve all 32 lanes at once; of 8, 16 of them; of 16, 8 of
// them, in the order of their numbers. ldmatrix reads one 8 x 8 matrix at a time, eight rows of 16 bytes.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "record.h"

alignas(1024) char memory[227 * 1024];

namespace record {

char global[1 << 21];

namespace {

constexpr const char* kNames[] = {"ld", "st", "ld (plain)", "st (plain)", "ldmatrix", "ldmatrix.trans", "cp.async"};

struct Access {
  Instruction instruction;
  uint32_t address;
  uint32_t width;  // bytes; of ldmatrix, of a row of all matrices
  int region;
  int interval;  // between which barriers
  Site site;

  bool is_matrices() const {
    return instruction == Instruction::load_matrices || instruction == Instruction::load_transposed;
  }
  auto key() const { return std::tuple(interval, region, instruction, width, site.file, site.line, site.function); }
};

// One instruction of a warp.
struct Request {
  Access access;  // that of the first lane that takes part
  std::array<uint32_t, 32> address;
  uint32_t lanes;  // that take part

  // The wavefronts, and how many there would be without conflicts.
  std::pair<int, int> wavefronts() const {
    const int width = access.is_matrices() ? 16 : static_cast<int>(access.width);
    const int together = 128 / width;
    int total = 0, least = 0;
    for (int first = 0; first < 32; first += together) {
      std::array<std::vector<uint32_t>, 32> words;  // that each bank has to give
      int most = 0;
      for (int lane = first; lane < first + together; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        for (uint32_t word = address[lane] / 4; word < (address[lane] + width) / 4; ++word) {
          auto& bank = words[word % 32];
          if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
          most = std::max(most, static_cast<int>(bank.size()));
        }
      }
      total += most;
      least += most > 0;
    }
    return {total, least};
  }
};

struct Cost {
  long instructions = 0, wavefronts = 0, least = 0;
};
using Pattern = std::tuple<std::string, std::string, std::string>;  // instruction, part of shared memory, function
struct Counts {
  std::map<Pattern, Cost> patterns;
  long shuffles = 0;  // instructions of warps
  int barriers = 0;
};

std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

// The thread that runs, and what it has done so far.
const Kernel* running = nullptr;
int running_thread = 0;
struct Trace {
  std::vector<Access> accesses;
  int barriers = 0;
  long shuffles = 0;
} trace;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s, thread %d: %s\n", running->name, running_thread, what.c_str());
  std::exit(1);
}

int region_of(uint32_t address, uint32_t width, const Site& site) {
  for (int i = 0; i < running->region_count; ++i) {
    const Region& region = running->regions[i];
    if (address >= region.first && address + width <= region.first + region.bytes) return i;
  }
  fail(std::string("access in ") + site.function + " at " + std::to_string(address) +
       ", in no part of SharedStorage that run.h knows");
}

void plain_access(const void* p, uint32_t width, Instruction instruction, const void* site) {
  if (!running) return;
  const char* at = static_cast<const char*>(p);
  if (at < memory || at >= memory + sizeof(memory)) return;
  access(instruction, address_of(p), width, {"", static_cast<const char*>(site), 0});
}

// The n-th access of a lane at one site between two barriers belongs to the n-th of the others, where all take part;
// lanes that do not take part in some leave off the last ones.
std::vector<Request> requests_of(const std::array<std::vector<Access>, 32>& lanes) {
  std::vector<Request> all;
  using Key = decltype(std::pair(Access{}.key(), 0));
  std::map<Key, size_t> places;
  auto join = [&](Request& request, int lane, const Access& access) {
    request.address[lane] = access.address;
    request.lanes |= 1u << lane;
  };
  const auto same = [](const Access& a, const Access& b) { return a.key() == b.key(); };
  const bool alike = std::all_of(lanes.begin(), lanes.end(), [&](const std::vector<Access>& lane) {
    return std::equal(lane.begin(), lane.end(), lanes[0].begin(), lanes[0].end(), same);
  });
  for (int lane = 0; lane < 32; ++lane) {
    std::map<decltype(Access{}.key()), int> occurrences;
    for (size_t i = 0; i < lanes[lane].size(); ++i) {
      const Access& access = lanes[lane][i];
      size_t place = i;
      if (!alike) {
        place = places.emplace(std::pair(access.key(), occurrences[access.key()]++), all.size()).first->second;
      }
      if (place == all.size()) all.push_back({access, {}, 0});
      join(all[place], lane, access);
    }
  }
  return all;
}

// Finds warps that meet without a barrier between them: of two that access a word, none may write it. Of cp.async the
// write counts between the barriers where it is issued, so it has to be waited for before the next.
class Races {
 public:
  void add(int warp, const Access& access) {
    const bool writes = access.instruction == Instruction::store || access.instruction == Instruction::plain_store ||
                        access.instruction == Instruction::copy_async;
    const uint32_t width = access.is_matrices() ? 16 : access.width;
    if (intervals_.size() <= static_cast<size_t>(access.interval)) intervals_.resize(access.interval + 1);
    auto& words = intervals_[access.interval];
    if (words.empty()) words.resize(sizeof(memory) / 4);
    for (uint32_t i = access.address / 4; i < (access.address + width) / 4; ++i) {
      Word& word = words[i];
      const bool alone = word.warp == kNone || word.warp == warp;
      if (!alone && (writes || word.written)) {
        fail("race with another warp after barrier " + std::to_string(access.interval) + ", " + access.site.function +
             " on " + running->regions[access.region].name);
      }
      word = {alone ? warp : kMany, word.written || writes};
    }
  }

 private:
  static constexpr int kNone = -1, kMany = -2;
  struct Word {
    int warp = kNone;  // that accesses it
    bool written = false;
  };
  std::vector<std::vector<Word>> intervals_;
};

Counts count(const Kernel& kernel, int tiles) {
  Races races;
  Counts counts;
  running = &kernel;
  for (int warp = 0; warp < kernel.threads / 32; ++warp) {
    std::array<std::vector<Access>, 32> lanes;
    long shuffles = 0;
    for (int lane = 0; lane < 32; ++lane) {
      running_thread = 32 * warp + lane;
      trace = {};
      kernel.run(tiles);
      if (running_thread == 0) counts.barriers = trace.barriers;
      if (trace.barriers != counts.barriers) fail("not as many barriers as thread 0");
      if (lane == 0) shuffles = trace.shuffles;
      if (trace.shuffles != shuffles) fail("not as many shuffles as lane 0");
      for (const Access& access : trace.accesses) races.add(warp, access);
      lanes[lane] = std::move(trace.accesses);
    }
    counts.shuffles += shuffles;
    for (const Request& request : requests_of(lanes)) {
      const Access& access = request.access;
      std::string name = kNames[static_cast<int>(access.instruction)];
      name += access.is_matrices() ? ".x" + std::to_string(access.width / 16) : " " + std::to_string(access.width);
      Cost& cost = counts.patterns[{name, kernel.regions[access.region].name, access.site.function}];
      const auto [wavefronts, least] = request.wavefronts();
      ++cost.instructions;
      cost.wavefronts += wavefronts;
      cost.least += least;
    }
  }
  running = nullptr;
  return counts;
}

void print(const Kernel& kernel) {
  const Counts one = count(kernel, 1), two = count(kernel, 2);
  count(kernel, 3);  // races alone: the third tile takes the place of the first, where there are two
  std::printf(
      "{\"kernel\": \"%s\", \"block_q\": %d, \"block_kv\": %d, \"warps\": %d, \"shuffles\": %ld, \"patterns\": [",
      kernel.name, kernel.block_q, kernel.block_kv, kernel.threads / 32, two.shuffles - one.shuffles);
  const char* separator = "";
  for (const auto& [pattern, cost] : two.patterns) {
    const auto& [instruction, region, function] = pattern;
    const auto found = one.patterns.find(pattern);
    const Cost before = found == one.patterns.end() ? Cost{} : found->second;
    std::printf(
        "%s{\"instruction\": \"%s\", \"of\": \"%s\", \"in\": \"%s\", \"all\": [%ld, %ld, %ld], "
        "\"a_step\": [%ld, %ld, %ld]}",
        separator, instruction.c_str(), region.c_str(), function.c_str(), cost.instructions, cost.wavefronts,
        cost.least, cost.instructions - before.instructions, cost.wavefronts - before.wavefronts,
        cost.least - before.least);
    separator = ", ";
  }
  std::printf("]}\n");
}

}  // namespace

bool add(const Kernel& kernel) {
  kernels().push_back(kernel);
  return true;
}

void access(Instruction instruction, unsigned address, unsigned width, const Site& site) {
  const bool matrices = instruction == Instruction::load_matrices || instruction == Instruction::load_transposed;
  const unsigned bytes = matrices ? 16 : width;
  if (address % bytes) fail("address " + std::to_string(address) + " of " + std::to_string(bytes) + " bytes");
  trace.accesses.push_back({instruction, address, width, region_of(address, bytes, site), trace.barriers, site});
}
void barrier() { ++trace.barriers; }
void shuffle() { ++trace.shuffles; }
unsigned address_of(const void* shared) { return static_cast<unsigned>(static_cast<const char*>(shared) - memory); }
int thread() { return running_thread; }

}  // namespace record

// What -fsanitize=thread calls: at the beginning, around every function, and before every access to memory.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define PLAIN_ACCESS(bytes)                                                                        \
  void __tsan_read##bytes(void* p) {                                                               \
    record::plain_access(p, bytes, record::Instruction::plain_load, __builtin_return_address(0));  \
  }                                                                                                \
  void __tsan_write##bytes(void* p) {                                                              \
    record::plain_access(p, bytes, record::Instruction::plain_store, __builtin_return_address(0)); \
  }
PLAIN_ACCESS(1)
PLAIN_ACCESS(2)
PLAIN_ACCESS(4)
PLAIN_ACCESS(8)
PLAIN_ACCESS(16)
void __tsan_read_range(void* p, unsigned long bytes) {
  record::plain_access(p, bytes, record::Instruction::plain_load, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
  record::plain_access(p, bytes, record::Instruction::plain_store, __builtin_return_address(0));
}
}

int main() {
  for (const record::Kernel& kernel : record::kernels()) record::print(kernel);
}
