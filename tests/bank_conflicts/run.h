// Included after a kernel's source: gives it a problem, and adds it to the kernels that are counted.
#pragma once

namespace jax_flash {

template <typename Storage>
constexpr bool has_rows = requires(Storage s) { s.rows; };
constexpr bool walks_over_rows = has_rows<SharedStorage>;  // the backward; the others walk over keys, but for
constexpr bool walks_over_heads = has_dbias;               // the pass for a bias that they share

// The parts of SharedStorage. What both stages have has one name.
template <typename Storage>
struct Regions {
  record::Region all[16];
  int count = 0;

  void add(const char* name, const Storage& storage, const auto& member) {
    const auto first = reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&storage);
    all[count++] = {name, static_cast<unsigned>(first), static_cast<unsigned>(sizeof(member))};
  }
  Regions() {
    const Storage& storage = *reinterpret_cast<const Storage*>(::memory);
    if constexpr (requires { storage.q; }) add("q", storage, storage.q);
    if constexpr (requires { storage.dout; }) add("dout", storage, storage.dout);
    if constexpr (requires { storage.k; }) add("k", storage, storage.k);
    if constexpr (requires { storage.v; }) add("v", storage, storage.v);
    if constexpr (requires { storage.stage; }) {
      for (const auto& stage : storage.stage) {
        add("rows", storage, stage.rows);
        add("keys", storage, stage.keys);
      }
    }
    if constexpr (requires { storage.ds; }) add("ds", storage, storage.ds);
    if constexpr (requires { storage.p; }) add("p", storage, storage.p);
    if constexpr (requires { storage.rows; }) {
      for (const auto& rows : storage.rows) {
        add("q", storage, rows.q);
        add("dout", storage, rows.dout);
        add("lse", storage, rows.lse);
        add("delta", storage, rows.delta);
      }
    }
  }
};

// One batch entry, one block, and one head unless it walks over them.
template <void (*kernel)(Problem)>
void run(int tiles) {
  constexpr int columns = limbs * at_least(head_dim, value_head_dim);
  Problem problem{};
  problem.options.scale = 1;
  problem.options.sequences = 1;
  problem.batch = problem.kv_heads = problem.group_splits = 1;
  problem.q_heads = walks_over_heads ? tiles : 1;
  problem.q_length = walks_over_rows ? tiles * block_q : block_q;
  problem.kv_length = walks_over_rows || walks_over_heads ? block_kv : tiles * block_kv;
  problem.head_dim = head_dim;
  problem.value_head_dim = value_head_dim;
  problem.q = problem.k = problem.v = problem.out = {record::global, 0, columns, 0};
  problem.dout = problem.dq = problem.dk = problem.dv = problem.q;
  problem.lse = problem.delta = problem.scratch = record::global;
  problem.bias = problem.lse;
  problem.dbias = problem.lse;
  static const float descale[] = {1, 1, 1, 1, 1, 0, 1, 1};
  problem.descale = descale;
  kernel(problem);
}

}  // namespace jax_flash

#define RECORD_KERNEL(name, kernel)                                                                                   \
  namespace jax_flash {                                                                                               \
  static const Regions<SharedStorage> regions;                                                                        \
  static const bool added = record::add({name, block_q, block_kv, threads, regions.all, regions.count, run<kernel>}); \
  }
