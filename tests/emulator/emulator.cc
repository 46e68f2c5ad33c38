// Runs the threads of a block one after the other on the host, each until it has to wait, in an order that a seed
// determines, and emulates Hopper's asynchronous operations: copies, MMAs, and the mbarriers that signal their
// completion. The seed also determines when these complete: as late as waiting for them allows, at once, or in between.
// So a missing wait, or data that is overwritten too early, gives wrong results with some seed; and a deadlock is
// detected and reported.
//
// Shared memory is kept twice: as threads see it, and as wgmma and TMA do. The latter see a thread's
// stores after its fence (fence.proxy.async) or, with half of the seeds, before.
#include "emulator.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "runtime.h"

constexpr unsigned kSharedBytes = 227 * 1024;
alignas(1024) char memory[kSharedBytes];

namespace emulator {
namespace {

alignas(1024) char engine_memory[kSharedBytes];  // as wgmma and TMA see it
constexpr size_t kStackBytes = 1 << 20;

void show_stores();

// An addition or a store from shared memory, which is read some time before what was read is added or written.
struct Bulk {
  std::function<void()> read, write;
};
struct Thread;
struct BulkGroup {
  Thread* owner;
  std::vector<Bulk> bulks;
  bool read;
};

struct Accumulators {
  std::vector<float> values;
  int pending = 0;  // products under way
};

struct Thread {
  ucontext_t beginning;
  jmp_buf rest;  // after the start: unlike swapcontext a jump makes no system call
  bool begun = false;
  unsigned index;
  bool done = false;
  std::function<bool()> ready;  // what it waits for; empty when it can go on
  std::string waits_for;
  Site site{};
  std::vector<std::pair<unsigned, unsigned>> unfenced;  // stores to shared memory: address and bytes

  bool products_fenced = false;
  uint64_t products = 0;                        // issued
  std::deque<uint64_t> groups;                  // the number of the last product of each committed group
  std::map<float*, Accumulators> accumulators;  // of products under way

  uint64_t bulks_committed = 0, bulk_groups_read = 0, bulk_groups_done = 0;
  std::vector<Bulk> open_bulks;

  std::vector<std::function<void()>> open_chunks;           // cp.async
  std::vector<std::pair<unsigned, unsigned>> chunk_places;  // of all since the last group or arrival
  std::deque<std::vector<std::function<void()>>> chunk_groups;
};

struct Warp {
  // Of two consecutive exchanges: a lane that begins the next one has finished reading the last.
  alignas(64) char slots[2][32][64];
  uint64_t exchanges = 0;
  unsigned arrived = 0;
  Site site{};
};

struct WarpgroupProduct {
  Product shape;
  Site site;
  std::array<Product, 128> of_thread;
  std::array<unsigned, 4> issued{};  // threads of each warp
};
struct Warpgroup {
  std::deque<WarpgroupProduct> products;  // not done by all warps
  uint64_t first = 0;                     // the number of the first of these
  std::array<uint64_t, 4> done{};         // by each warp
  int registers = 0;
};

struct Barrier {
  unsigned arrivals = 0;  // of each phase
  unsigned missing = 0;   // arrivals, of this phase
  int64_t bytes = 0;      // expected and not there
  uint64_t phase = 0;

  void settle() {
    if (missing || bytes) return;
    ++phase;
    missing = arrivals;
  }
};

struct NamedBarrier {
  unsigned count = 0, arrived = 0;
  uint64_t generation = 0;
};

// When asynchronous operations complete.
enum class When { late, early, any };

struct Block {
  unsigned index = 0, count = 0;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::map<unsigned, Barrier> barriers;
  std::array<NamedBarrier, 16> named;
  std::deque<std::function<void()>> copies;
  std::vector<std::pair<unsigned, unsigned>> unfenced;  // chunks that have come behind an arrival
  std::deque<BulkGroup> bulk_groups;
  jmp_buf scheduler;
  Thread* running = nullptr;
  unsigned shared_bytes = 0;
  std::mt19937 random;
  When copies_when = When::late, products_when = When::late;
  bool stores_at_once = false;  // whether wgmma and TMA see stores before their fence
  std::string error;
};
Block block_;
const std::function<void()>* body_ = nullptr;

std::string place(const Site& site) {
  std::string file = site.file ? site.file : "";
  if (size_t at = file.rfind("csrc/"); at != std::string::npos) file = file.substr(at);
  const std::string function = site.function ? site.function : "?";
  return function.substr(0, function.find('<')) + " (" + file + ":" + std::to_string(site.line) + ")";
}

// Switches from a thread back to the scheduler.
void leave() {
  if (_setjmp(block_.running->rest) == 0) _longjmp(block_.scheduler, 1);
}

[[noreturn]] void stop(const std::string& what) {
  if (block_.error.empty()) {
    block_.error = what;
    if (block_.running) {
      block_.error = "block " + std::to_string(block_.index) + ", warp " + std::to_string(block_.running->index / 32) +
                     ", lane " + std::to_string(block_.running->index % 32) + ": " + what;
    }
  }
  if (block_.running) leave();
  std::abort();  // never resumed
}

Thread& self() { return *block_.running; }
Warp& warp_of(const Thread& thread) { return block_.warps[thread.index / 32]; }
Warpgroup& warpgroup_of(const Thread& thread) { return block_.warpgroups[thread.index / 128]; }

// The places that synchronise threads, and the one of them that is left out.
std::map<std::string, bool> waits_;
std::string omitted_;
bool omitted(const char* what, const Site& site) {
  const std::string text = what + (" in " + place(site));
  waits_[text] = true;
  return text == omitted_;
}

// Lets others run until `ready`.
void wait(std::string what, const Site& site, std::function<bool()> ready) {
  if (ready()) return;
  Thread& me = self();
  me.ready = std::move(ready);
  me.waits_for = std::move(what);
  me.site = site;
  leave();
}

bool chance(double p) { return std::uniform_real_distribution<double>()(block_.random) < p; }
size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(block_.random); }

// Products

float bf16_to_float(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }

// Where 16 bytes lie in shared memory with the 128-byte swizzle.
unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// Eight neighbours.
std::array<float, 8> elements(unsigned address, bool bf16, const Site& site) {
  address = swizzled(address);
  if (address + 16 > block_.shared_bytes) stop("a product reads at " + std::to_string(address) + ", " + place(site));
  std::array<uint16_t, 8> from;
  std::memcpy(&from, engine_memory + address, 16);
  std::array<float, 8> to;
  for (unsigned i = 0; i < 8; ++i) to[i] = bf16 ? bf16_to_float(from[i]) : half_to_float(from[i]);
  return to;
}

// Operand [16][n] in floats, k the slower index.
void read_operand(std::vector<float>& to, unsigned long long descriptor, unsigned n, bool by_columns, bool bf16,
                  const Site& site) {
  const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                 stride = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) stop("a product's operand without the 128-byte swizzle, " + place(site));
  if (descriptor >> 49 & 7) stop("a product's operand with a base offset, " + place(site));
  if (start >> 7 & 7) stop("a product's operand that begins within a pattern of the swizzle, " + place(site));
  to.resize(16 * n);
  if (by_columns) {
    for (unsigned k = 0; k < 16; ++k) {
      for (unsigned i = 0; i < n; i += 8) {
        const unsigned offset = i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2;
        const std::array<float, 8> x = elements(start + offset, bf16, site);
        std::copy(x.begin(), x.end(), &to[k * n + i]);
      }
    }
  } else {
    for (unsigned i = 0; i < n; ++i) {
      for (unsigned k = 0; k < 16; k += 8) {
        const std::array<float, 8> x = elements(start + i / 8 * stride + i % 8 * 128 + k * 2, bf16, site);
        for (unsigned j = 0; j < 8; ++j) to[(k + j) * n + i] = x[j];
      }
    }
  }
}

void show_stores() {
  if (!block_.stores_at_once) return;
  for (const auto& thread : block_.threads) {
    for (auto [address, bytes] : thread->unfenced) std::memcpy(engine_memory + address, memory + address, bytes);
  }
  for (auto [address, bytes] : block_.unfenced) std::memcpy(engine_memory + address, memory + address, bytes);
}

// The 16 rows of one warp.
void run_product(WarpgroupProduct& all, int warpgroup, unsigned warp) {
  const unsigned first_thread = 32 * warp;
  show_stores();
  const Product& p = all.shape;
  std::vector<float> a(64 * 16), b;
  read_operand(b, p.b, p.columns, p.b_by_columns, p.bf16, all.site);
  if (p.a_in_registers) {
    for (unsigned t = first_thread; t < first_thread + 32; ++t) {
      for (unsigned i = 0; i < 4; ++i) {
        for (unsigned e = 0; e < 2; ++e) {
          const unsigned row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8, k = i / 2 * 8 + t % 4 * 2 + e;
          const uint16_t x = all.of_thread[t].a_registers[i] >> 16 * e;
          a[k * 64 + row] = p.bf16 ? bf16_to_float(x) : half_to_float(x);
        }
      }
    }
  } else {
    read_operand(a, p.a, 64, p.a_by_columns, p.bf16, all.site);
  }
  std::vector<float> sums(p.columns);
  for (unsigned row = 16 * warp; row < 16 * warp + 16; ++row) {
    std::fill(sums.begin(), sums.end(), 0.f);
    for (unsigned k = 0; k < 16; ++k) {
      const float x = a[k * 64 + row];
      for (unsigned i = 0; i < p.columns; ++i) sums[i] += x * b[k * p.columns + i];
    }
    for (unsigned quarter = 0; quarter < 4; ++quarter) {
      const unsigned t = row / 16 * 32 + row % 8 * 4 + quarter, half = row / 8 % 2;
      Thread& thread = *block_.threads[128 * warpgroup + t];
      const Product& own = all.of_thread[t];
      std::vector<float>& values = thread.accumulators.at(own.accumulators).values;
      for (unsigned n = 0; n < p.columns / 8; ++n) {
        for (unsigned e = 0; e < 2; ++e) {
          float& to = values[n * 4 + 2 * half + e];
          to = (p.accumulate ? to : 0.f) + sums[n * 8 + quarter * 2 + e];
        }
      }
    }
  }
  for (unsigned t = first_thread; t < first_thread + 32; ++t) {
    Thread& thread = *block_.threads[128 * warpgroup + t];
    const auto found = thread.accumulators.find(all.of_thread[t].accumulators);
    if (--found->second.pending == 0) {
      std::copy(found->second.values.begin(), found->second.values.end(), found->first);
      thread.accumulators.erase(found);
    }
  }
}

// A warp's quarter may begin when that warp has issued it, before the others have: they must not rely on its waiting
// for them. The MMA is done when it is done for each warp.
void finish_product(int warpgroup, unsigned warp) {
  Warpgroup& group = block_.warpgroups[warpgroup];
  run_product(group.products[group.done[warp]++ - group.first], warpgroup, warp);
  while (*std::min_element(group.done.begin(), group.done.end()) > group.first) {
    group.products.pop_front();
    ++group.first;
  }
}

// Completes asynchronous operations that can be done now: copies in any order, MMAs and bulk additions in theirs.
struct Choice {
  int copy = -1, warp = -1, bulk = -1;
};
std::vector<Choice> choices(bool of_copies, bool of_products) {
  std::vector<Choice> all;
  if (of_copies) {
    for (int i = 0; i < static_cast<int>(block_.copies.size()); ++i) all.push_back({i, -1, -1});
    std::vector<Thread*> seen;
    for (int i = 0; i < static_cast<int>(block_.bulk_groups.size()); ++i) {
      Thread* owner = block_.bulk_groups[i].owner;
      if (std::find(seen.begin(), seen.end(), owner) == seen.end()) all.push_back({-1, -1, i});
      seen.push_back(owner);
    }
  }
  if (of_products) {
    for (int i = 0; i < static_cast<int>(block_.warps.size()); ++i) {
      const Warpgroup& group = block_.warpgroups[i / 4];
      const uint64_t next = group.done[i % 4] - group.first;
      if (next < group.products.size() && group.products[next].issued[i % 4] == 32) all.push_back({-1, i, -1});
    }
  }
  return all;
}
void finish(const Choice& choice) {
  if (choice.copy >= 0) {
    const auto copy = std::move(block_.copies[choice.copy]);
    block_.copies.erase(block_.copies.begin() + choice.copy);
    copy();
  } else if (choice.bulk >= 0) {
    BulkGroup& group = block_.bulk_groups[choice.bulk];
    if (!group.read) {
      for (Bulk& bulk : group.bulks) bulk.read();
      group.read = true;
      ++group.owner->bulk_groups_read;
    } else {
      for (const Bulk& bulk : group.bulks) bulk.write();
      ++group.owner->bulk_groups_done;
      block_.bulk_groups.erase(block_.bulk_groups.begin() + choice.bulk);
    }
  } else {
    finish_product(choice.warp / 4, choice.warp % 4);
  }
}

void run_thread(Thread& thread) {
  thread.ready = nullptr;
  block_.running = &thread;
  if (_setjmp(block_.scheduler) == 0) {
    if (thread.begun) _longjmp(thread.rest, 1);
    thread.begun = true;
    setcontext(&thread.beginning);
  }
  block_.running = nullptr;
}

void thread_main() {
  (*body_)();
  Thread& me = self();
  if (!me.accumulators.empty()) stop("ends with products under way, " + place(me.site));
  if (me.bulk_groups_done != me.bulks_committed || !me.open_bulks.empty()) {
    stop("ends with bulk copies under way");
  }
  me.done = true;
  leave();
}

bool runnable(const Thread& thread) { return !thread.done && (!thread.ready || thread.ready()); }

// Runs the lanes of a warp as far as they go; returns whether any could run.
bool run_warp(unsigned warp) {
  bool any = false;
  for (bool again = true; again && block_.error.empty();) {
    again = false;
    for (unsigned lane = 0; lane < 32 && block_.error.empty(); ++lane) {
      Thread& thread = *block_.threads[32 * warp + lane];
      if (!runnable(thread)) continue;
      run_thread(thread);
      any = again = true;
    }
  }
  return any;
}

std::string deadlock() {
  std::string text = "block " + std::to_string(block_.index) + ": everybody waits";
  for (const auto& thread : block_.threads) {
    if (thread->done) continue;
    const bool first = thread->index % 32 == 0;
    const Thread* before = first ? nullptr : block_.threads[thread->index - 1].get();
    if (before && !before->done && before->waits_for == thread->waits_for && before->site.line == thread->site.line) {
      continue;
    }
    text += "\n  warp " + std::to_string(thread->index / 32) + " from lane " + std::to_string(thread->index % 32) +
            ": for " + thread->waits_for + ", in " + place(thread->site);
  }
  for (const auto& [address, barrier] : block_.barriers) {
    text += "\n  barrier at " + std::to_string(address) + ": phase " + std::to_string(barrier.phase) + ", " +
            std::to_string(barrier.missing) + " of " + std::to_string(barrier.arrivals) + " arrivals and " +
            std::to_string(barrier.bytes) + " bytes missing";
  }
  return text;
}

char* stack_of(unsigned thread) {
  static std::vector<char*> stacks;
  while (stacks.size() <= thread) {
    void* p = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) std::abort();
    stacks.push_back(static_cast<char*>(p));
  }
  return stacks[thread];
}

}  // namespace

// Runs one block; returns the error, or an empty string.
std::string run_block(unsigned index, unsigned blocks, unsigned threads, unsigned shared_bytes, unsigned seed,
                      const std::function<void()>& body) {
  if (shared_bytes > kSharedBytes) return std::to_string(shared_bytes) + " bytes of shared memory";
  block_ = Block{};
  block_.index = index;
  block_.count = blocks;
  block_.shared_bytes = shared_bytes;
  block_.warps.resize(threads / 32);
  block_.warpgroups.resize((threads + 127) / 128);
  block_.random.seed(seed * 1000003 + index);
  constexpr When kWhen[][2] = {
      {When::late, When::late}, {When::early, When::late}, {When::late, When::early}, {When::any, When::any}};
  block_.copies_when = kWhen[seed % 4][0];
  block_.products_when = kWhen[seed % 4][1];
  block_.stores_at_once = seed / 4 % 2 == 1;
  std::memset(memory, 0xff, sizeof(memory));  // NaN
  std::memset(engine_memory, 0xff, sizeof(engine_memory));
  body_ = &body;
  for (unsigned i = 0; i < threads; ++i) {
    block_.threads.push_back(std::make_unique<Thread>());
    Thread& thread = *block_.threads.back();
    thread.index = i;
    getcontext(&thread.beginning);
    thread.beginning.uc_stack.ss_sp = stack_of(i);
    thread.beginning.uc_stack.ss_size = kStackBytes;
    thread.beginning.uc_link = nullptr;
    makecontext(&thread.beginning, thread_main, 0);
  }

  // Always takes the first warp that can run, in an order that changes now and then: so one warp runs far ahead of
  // others.
  std::vector<unsigned> order(threads / 32);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  if (seed == 1) std::reverse(order.begin(), order.end());
  while (block_.error.empty()) {
    if (seed > 1 && chance(0.05)) std::shuffle(order.begin(), order.end(), block_.random);
    for (int i = 0; i < 2; ++i) {
      const bool of_copies = i == 0;
      const When when = of_copies ? block_.copies_when : block_.products_when;
      if (when == When::late) continue;
      for (;;) {
        const std::vector<Choice> now = choices(of_copies, !of_copies);
        if (now.empty() || (when == When::any && !chance(0.3))) break;
        finish(now[below(now.size())]);
      }
    }
    bool any = false;
    for (size_t i = 0; i < order.size() && !any; ++i) any = run_warp(order[i]);
    if (any || !block_.error.empty()) continue;
    const std::vector<Choice> left = choices(true, true);
    if (!left.empty()) {
      finish(left[below(left.size())]);
      continue;
    }
    const bool done = std::all_of(block_.threads.begin(), block_.threads.end(), [](auto& t) { return t->done; });
    if (!done) block_.error = deadlock();
    break;
  }
  int registers = 0;
  for (const Warpgroup& group : block_.warpgroups) registers += group.registers;
  // As many as the block was launched with.
  const int limit = static_cast<int>(65536 / threads / 8 * 8 * block_.warpgroups.size());
  if (block_.error.empty() && registers > limit) {
    block_.error = "warpgroups take " + std::to_string(registers) + " registers for each of 128 threads, of " +
                   std::to_string(limit);
  }
  return block_.error;
}

std::string waits() {
  std::string text;
  for (const auto& [wait, _] : waits_) text += wait + "\n";
  return text;
}
void forget() { waits_.clear(); }
void omit(const std::string& wait) { omitted_ = wait; }

unsigned thread() { return self().index; }
unsigned block() { return block_.index; }
unsigned blocks() { return block_.count; }
unsigned threads() { return static_cast<unsigned>(block_.threads.size()); }
unsigned address_of(const void* shared) { return static_cast<unsigned>(static_cast<const char*>(shared) - memory); }
void fail(const char* what, const Site& site) { stop(std::string(what) + ", " + place(site)); }

const char* exchange(const void* mine, unsigned size, const Site& site) {
  Thread& me = self();
  Warp& warp = warp_of(me);
  const uint64_t number = warp.exchanges;
  if (warp.arrived == 0) warp.site = site;
  if (warp.site.line != site.line || std::strcmp(warp.site.file, site.file) != 0) {
    stop("lanes of a warp meet at " + place(warp.site) + " and at " + place(site));
  }
  std::memcpy(warp.slots[number % 2][me.index % 32], mine, size);
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.exchanges;
  } else {
    wait("the other lanes of the warp", site, [&warp, number] { return warp.exchanges > number; });
  }
  return warp.slots[number % 2][0];
}

void named_barrier(unsigned barrier, unsigned count, bool waits, const Site& site) {
  if (barrier >= 16 || count % 32 || count > threads())
    stop("barrier " + std::to_string(barrier) + " of " + std::to_string(count) + " threads, " + place(site));
  if (omitted(waits ? "numbered barrier" : "arrival at a numbered barrier", site)) return;
  NamedBarrier& named = block_.named[barrier];
  if (named.arrived == 0) named.count = count;
  if (named.count != count) stop("barrier " + std::to_string(barrier) + " has another count, " + place(site));
  const uint64_t generation = named.generation;
  if (++named.arrived == count) {
    named.arrived = 0;
    ++named.generation;
  } else if (waits) {
    wait("numbered barrier " + std::to_string(barrier) + " of " + std::to_string(count) + " threads", site,
         [&named, generation] { return named.generation > generation; });
  }
}

char* shared(unsigned address, unsigned width, const Site& site) {
  if (address % width || address + width > block_.shared_bytes) {
    stop("address " + std::to_string(address) + " of " + std::to_string(width) + " bytes, " + place(site));
  }
  return memory + address;
}
void written(unsigned address, unsigned bytes) { self().unfenced.push_back({address, bytes}); }
void proxy_fence(const Site& site) {
  if (omitted("fence of stores", site)) return;
  for (auto [address, bytes] : self().unfenced) std::memcpy(engine_memory + address, memory + address, bytes);
  self().unfenced.clear();
  for (auto [address, bytes] : block_.unfenced) std::memcpy(engine_memory + address, memory + address, bytes);
  block_.unfenced.clear();
}

namespace {
Barrier& known_barrier(unsigned address, const Site& site) {
  const auto found = block_.barriers.find(address);
  if (found == block_.barriers.end()) stop("no barrier at " + std::to_string(address) + ", " + place(site));
  return found->second;
}
}  // namespace

void barrier_init(unsigned barrier, unsigned arrivals, const Site& site) {
  shared(barrier, 8, site);
  if (block_.barriers.count(barrier)) stop("barrier made twice, " + place(site));
  block_.barriers[barrier] = {arrivals, arrivals, 0, 0};
}
void barrier_arrive(unsigned barrier, unsigned count, const Site& site) {
  if (omitted("arrival", site)) return;
  Barrier& b = known_barrier(barrier, site);
  if (b.missing < count) stop("more arrivals than the barrier counts, " + place(site));
  b.missing -= count;
  b.settle();
}
void barrier_expect(unsigned barrier, unsigned bytes, const Site& site) {
  Barrier& b = known_barrier(barrier, site);
  if (b.missing == 0) stop("more arrivals than the barrier counts, " + place(site));
  b.bytes += bytes;
  --b.missing;
  b.settle();
}
void barrier_wait(unsigned barrier, unsigned parity, const Site& site) {
  if (omitted("wait", site)) return;
  const Barrier& b = known_barrier(barrier, site);
  if (parity > 1) stop("a parity of " + std::to_string(parity) + ", " + place(site));
  wait("barrier at " + std::to_string(barrier) + ", parity " + std::to_string(parity), site,
       [&b, parity] { return b.phase % 2 != parity; });
}

namespace {
Map map_at(const void* map, const Site& site) {
  Map m;
  std::memcpy(&m, map, sizeof(m));
  if (m.mark != Map::kMark) stop("no tensor map, " + place(site));
  return m;
}
// A row of a box, and how many bytes of it are in the array.
std::pair<char*, int64_t> line_of(const Map& m, int64_t column, int64_t row, int64_t head, int64_t batch) {
  const int64_t at[4] = {column, row, head, batch};
  bool inside = at[0] >= 0;
  char* line = static_cast<char*>(m.data) + 2 * at[0];
  for (int d = 1; d < 4; ++d) {
    inside = inside && at[d] >= 0 && at[d] < static_cast<int64_t>(m.sizes[d]);
    line += at[d] * static_cast<int64_t>(m.strides[d - 1]);
  }
  return {line, inside ? 2 * std::clamp<int64_t>(static_cast<int64_t>(m.sizes[0]) - at[0], 0, 64) : 0};
}
}  // namespace
void copy_box(unsigned to, const void* map, unsigned barrier, int column, int row, int head, int batch,
              const Site& site) {
  const Map m = map_at(map, site);
  const unsigned rows = m.box[1];
  if (to % 1024) stop("a copy to " + std::to_string(to) + ", no multiple of 1024, " + place(site));
  if (to + rows * 128 > block_.shared_bytes) stop("a copy beyond shared memory, " + place(site));
  known_barrier(barrier, site);
  block_.copies.push_back([=] {
    for (unsigned i = 0; i < rows; ++i) {
      const auto [from, bytes] = line_of(m, column, row + static_cast<int64_t>(i), head, batch);
      char line[128] = {};  // zeros where the array is not
      std::memcpy(line, from, bytes);
      for (unsigned chunk = 0; chunk < 8; ++chunk) {
        const unsigned address = swizzled(to + i * 128 + chunk * 16);
        std::memcpy(memory + address, line + 16 * chunk, 16);
        std::memcpy(engine_memory + address, line + 16 * chunk, 16);
      }
    }
    Barrier& b = block_.barriers.at(barrier);
    b.bytes -= rows * 128;
    b.settle();
  });
}

namespace {
// `write` gets the bytes that have been read.
void start_bulk(const void* to, unsigned from, unsigned bytes, const std::function<void(const char*)>& write,
                const Site& site) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || from % 16 || bytes % 16 || from + bytes > block_.shared_bytes) {
    stop("a bulk copy of " + std::to_string(bytes) + " bytes at " + std::to_string(from) + ", " + place(site));
  }
  const auto there = std::make_shared<std::vector<char>>(bytes);
  const auto read = [=] {
    show_stores();
    std::memcpy(there->data(), engine_memory + from, bytes);
  };
  self().open_bulks.push_back({read, [=] { write(there->data()); }});
}
}  // namespace
void add_bulk(float* to, unsigned from, unsigned bytes, const Site& site) {
  const auto write = [=](const char* read) {
    for (unsigned i = 0; i < bytes / 4; ++i) to[i] += reinterpret_cast<const float*>(read)[i];
  };
  start_bulk(to, from, bytes, write, site);
}
void store_bulk(void* to, unsigned from, unsigned bytes, const Site& site) {
  start_bulk(to, from, bytes, [=](const char* read) { std::memcpy(to, read, bytes); }, site);
}
void store_box(const void* map, unsigned from, int column, int row, int head, int batch, const Site& site) {
  const Map m = map_at(map, site);
  const unsigned rows = m.box[1];
  if (from % 1024 || from + rows * 128 > block_.shared_bytes) {
    stop("a store from " + std::to_string(from) + ", " + place(site));
  }
  const auto lines = std::make_shared<std::vector<char>>(rows * 128);
  const auto read = [=] {
    show_stores();
    for (unsigned chunk = 0; chunk < rows * 8; ++chunk) {
      std::memcpy(lines->data() + chunk * 16, engine_memory + swizzled(from + chunk * 16), 16);
    }
  };
  const auto write = [=] {
    for (unsigned i = 0; i < rows; ++i) {
      if (const auto [to, bytes] = line_of(m, column, row + static_cast<int64_t>(i), head, batch); bytes > 0) {
        std::memcpy(to, lines->data() + i * 128, bytes);
      }
    }
  };
  self().open_bulks.push_back({read, write});
}
void bulk_commit() {
  Thread& me = self();
  ++me.bulks_committed;
  block_.bulk_groups.push_back({&me, std::move(me.open_bulks), false});
  me.open_bulks.clear();
}
void bulk_wait_read(unsigned pending, const Site& site) {
  if (omitted("wait for reads of bulk copies", site)) return;
  Thread& me = self();
  wait("its bulk copies' reads", site, [&me, pending] { return me.bulk_groups_read + pending >= me.bulks_committed; });
}
void bulk_wait(unsigned pending, const Site& site) {
  if (omitted("wait for bulk copies", site)) return;
  Thread& me = self();
  wait("its bulk copies", site, [&me, pending] { return me.bulk_groups_done + pending >= me.bulks_committed; });
}

void copy_chunk(unsigned to, const void* from, unsigned bytes, const Site& site) {
  char* here = shared(to, bytes, site);
  auto copy = [=] {
    if (from) {
      std::memcpy(here, from, bytes);
    } else {
      std::memset(here, 0, bytes);
    }
  };
  const bool now = block_.copies_when == When::early || (block_.copies_when == When::any && chance(0.5));
  if (now) {
    copy();
  } else {
    self().open_chunks.push_back(copy);
  }
  self().chunk_places.push_back({to, bytes});
}
void chunks_commit() {
  Thread& me = self();
  me.chunk_groups.push_back(std::move(me.open_chunks));
  me.open_chunks.clear();
  me.chunk_places.clear();
}
void barrier_arrive_behind_chunks(unsigned barrier, const Site& site) {
  known_barrier(barrier, site);
  Thread& me = self();
  block_.copies.push_back([chunks = std::move(me.open_chunks), places = std::move(me.chunk_places), barrier, site] {
    for (const auto& copy : chunks) copy();
    block_.unfenced.insert(block_.unfenced.end(), places.begin(), places.end());
    barrier_arrive(barrier, 1, site);
  });
  me.open_chunks.clear();
  me.chunk_places.clear();
}
void chunks_wait(unsigned pending, const Site& site) {
  if (omitted("wait for copies", site)) return;
  Thread& me = self();
  while (me.chunk_groups.size() > pending) {
    for (const auto& copy : me.chunk_groups.front()) copy();
    me.chunk_groups.pop_front();
  }
}

void product(const Product& product, const Site& site) {
  Thread& me = self();
  Warpgroup& group = warpgroup_of(me);
  if (!me.products_fenced) stop("a product without a fence since the last wait, " + place(site));
  const uint64_t number = me.products++;
  if (number < group.first) std::abort();
  if (number - group.first == group.products.size()) group.products.push_back({product, site, {}, {}});
  WarpgroupProduct& all = group.products[number - group.first];
  const Product& p = all.shape;
  if (p.columns != product.columns || p.a != product.a || p.b != product.b || p.accumulate != product.accumulate ||
      p.a_in_registers != product.a_in_registers || p.a_by_columns != product.a_by_columns ||
      p.b_by_columns != product.b_by_columns) {
    stop("a product that is another one for other threads of the warpgroup, " + place(site));
  }
  all.of_thread[me.index % 128] = product;
  // Until it is done the contents of the accumulators are undefined.
  const unsigned count = product.columns / 2;
  Accumulators& own = me.accumulators[product.accumulators];
  if (own.pending++ == 0) {
    own.values.assign(product.accumulators, product.accumulators + count);
    std::fill_n(product.accumulators, count, std::numeric_limits<float>::quiet_NaN());
  } else if (own.values.size() != count) {
    stop("accumulators of another size than those of a product under way, " + place(site));
  }
  me.site = site;
  ++all.issued[me.index % 128 / 32];
}
void products_fence(const Site& site) {
  if (!omitted("fence of products", site)) self().products_fenced = true;
}
void products_commit() { self().groups.push_back(self().products); }
void products_wait(unsigned pending, const Site& site) {
  if (omitted("wait for products", site)) return;
  Thread& me = self();
  const Warpgroup& group = warpgroup_of(me);
  while (me.groups.size() > pending) {
    const uint64_t last = me.groups.front();
    wait("its products", site, [&group, last] { return group.first >= last; });
    me.groups.pop_front();
  }
  me.products_fenced = false;
}

void registers(unsigned count, bool, const Site& site) {
  if (count % 8 || count < 24 || count > 256) stop(std::to_string(count) + " registers, " + place(site));
  warpgroup_of(self()).registers = static_cast<int>(count);
}

float half_to_float(unsigned short x) {
  static const std::vector<float> all = [] {
    std::vector<float> all(1 << 16);
    for (unsigned i = 0; i < all.size(); ++i) {
      all[i] = static_cast<float>(__builtin_bit_cast(_Float16, static_cast<unsigned short>(i)));
    }
    return all;
  }();
  return all[x];
}
unsigned short float_to_half(float x) { return __builtin_bit_cast(unsigned short, static_cast<_Float16>(x)); }
unsigned short float_to_bf16(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if (std::isnan(x)) return static_cast<unsigned short>(bits >> 16 | 0x40);
  bits += 0x7fff + (bits >> 16 & 1);
  return static_cast<unsigned short>(bits >> 16);
}

namespace {
void plain_write(const void* p, unsigned bytes) {
  const char* at = static_cast<const char*>(p);
  if (block_.running && at >= memory && at < memory + sizeof(memory)) written(address_of(p), bytes);
}
}  // namespace

}  // namespace emulator

// What -fsanitize=thread calls: at the beginning, around every function, and before every access to memory.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void*, unsigned long) {}
void __tsan_write_range(void* p, unsigned long bytes) { emulator::plain_write(p, static_cast<unsigned>(bytes)); }
#define PLAIN_ACCESS(bytes)                                                        \
  void __tsan_read##bytes(void*) {}                                                \
  void __tsan_unaligned_read##bytes(void*) {}                                      \
  void __tsan_write##bytes(void* p) { emulator::plain_write(p, bytes); }           \
  void __tsan_unaligned_write##bytes(void* p) { emulator::plain_write(p, bytes); } \
  void __tsan_volatile_read##bytes(void*) {}                                       \
  void __tsan_volatile_write##bytes(void* p) { emulator::plain_write(p, bytes); }
PLAIN_ACCESS(1)
PLAIN_ACCESS(2)
PLAIN_ACCESS(4)
PLAIN_ACCESS(8)
PLAIN_ACCESS(16)

// What -fsanitize=alignment calls when a pointer is not a multiple of what its type has to be: `where` begins with
// file, line and column.
void __ubsan_handle_type_mismatch_v1(void* where, unsigned long pointer) {
  struct Where {
    const char* file;
    unsigned line, column;
  };
  const Where& at = *static_cast<const Where*>(where);
  emulator::fail(("an access that is not aligned, to " + std::to_string(pointer)).c_str(), {"", at.file, at.line});
}
}
