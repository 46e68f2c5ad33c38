#include "cuda/host/family.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "cuda/host/tuned.h"

namespace jax_flash::cuda {

const Family& family_named(const std::string& name) {
  for (const Family& family : kFamilies) {
    if (name == family.name) return family;
  }
  throw std::invalid_argument("no kernel family has the name " + name);
}

const Family* family_of(int arch, const std::string& name, const char* by) {
  std::string known;
  for (const Family& family : kFamilies) {
    const bool runs = arch >= family.from && arch <= family.to;
    if (runs && (name.empty() || name == family.name)) return &family;
    known += std::string(known.empty() ? "" : ", ") + family.name;
  }
  if (!name.empty()) {
    throw std::runtime_error(std::string(by) + " must be one of " + known + ", for a GPU that can run it, got " + name);
  }
  return nullptr;
}

const Family* family_of(int arch) {
  const char* forced = std::getenv("JAX_FLASH_CUDA_FAMILY");
  return family_of(arch, forced ? forced : "", "JAX_FLASH_CUDA_FAMILY");
}

const Family& served_family(int arch) {
  if (const Family* family = family_of(arch)) return *family;
  throw std::invalid_argument("no kernels for compute capability " + std::to_string(arch / 10) + "." +
                              std::to_string(arch % 10));
}

const Family& pass_family(const Family& family, int arch, int limbs, Pass pass, int head_dim, Calls calls) {
  if (!*family.fallback || find_tile_row(family.name, limbs, pass, head_dim, arch, calls)) return family;
  return family_named(family.fallback);
}

bool orders_dq(const Family& family, const Options& o, int largest_head_dim) {
  // A block has to know which blocks before it add to a tile. And sums of other gradients have no order.
  const bool sums_others = o.has_dbias || o.has_dalibi_slopes;
  return o.ordered_dq && family.orders_dq && !o.highest_precision && largest_head_dim <= family.separate_dq_above &&
         !(skips_tiles(o) || sums_others || o.functions);
}

bool separate_dq(const Family& family, const Options& options, int largest_head_dim) {
  const bool asked = options.separate_dq && !orders_dq(family, options, largest_head_dim);
  return asked || options.highest_precision || largest_head_dim > family.separate_dq_above;
}

Variant variant_of(const Family& device_family, int arch, Pass pass, DType dtype, int head_dim, int value_head_dim,
                   const Options& options, int rows, const std::string& gpu) {
  const int limbs = options.highest_precision ? 2 : 1;
  const int largest = std::max(head_dim, value_head_dim);
  const bool own_dq = separate_dq(device_family, options, largest);
  const bool without_dq = pass == Pass::backward && own_dq && largest <= device_family.lean_without_dq;
  const bool wants_registers = options.has_descale || options.has_q_lengths || options.has_kv_lengths;
  const Calls most = without_dq && wants_registers ? Calls::without_functions : Calls::plain;
  const Calls calls = std::min(calls_of(options), most);
  const bool plain = calls == Calls::plain;
  const Family& family = pass_family(device_family, arch, limbs, pass, largest, calls);
  if (dtype == DType::f32 || dtype == DType::f64) {
    throw std::invalid_argument(
        "dtype of a kernel must be float16 or bfloat16; float32 is passed as float16 with descale");
  }
  if (dtype == DType::bf16 && family.float16_only) {
    throw std::invalid_argument(std::string("kernels of ") + family.name +
                                " take float16 only; bfloat16 is passed as float16 with descale");
  }
  if (options.highest_precision && !options.has_descale) {
    throw std::invalid_argument("highest_precision needs float16 arrays of two limbs and their descale, got none");
  }
  const bool listed = pass == Pass::forward || pass == Pass::backward || pass == Pass::backward_dq ||
                      (pass == Pass::forward_split_kv && options.has_descale);
  if (options.has_kv_rows && !listed) {
    throw std::invalid_argument(std::string(pass_name(pass)) + " takes no kv_rows");
  }
  const TileRow& tile = tile_row(family.name, limbs, pass, largest, arch, calls, rows);
  Variant variant{family.name, arch, pass, dtype, head_dim, value_head_dim, options, tile, rows};
  const bool tunable = plain && !without_dq && !options.has_descale && head_dim == value_head_dim;
  if (!gpu.empty() && tunable) {
    if (auto row = tuned_row(gpu, family.name, pass, head_dim)) variant.set_tuned(*row);
  }
  const bool forward = pass == Pass::forward || pass == Pass::forward_split_kv || pass == Pass::forward_single_tile;
  variant.options.separate_dq = !forward && pass != Pass::scale && own_dq;
  variant.options.ordered_dq = pass == Pass::backward && orders_dq(device_family, options, largest);
  // They are there with descale, which is compiled in.
  Options& o = variant.options;
  o.has_original_query = o.has_original_key = o.has_original_value = o.has_original_dout = false;
  return variant;
}

Variant scale_variant(const Family& device_family, int arch, const Options& of_call, int largest_head_dim) {
  Options options{};
  options.has_descale = true;
  options.highest_precision = of_call.highest_precision;
  options.original_bfloat16 = of_call.original_bfloat16;
  const int columns = largest_head_dim <= 64 ? 64 : largest_head_dim <= 128 ? 128 : kScaledColumns;
  return variant_of(device_family, arch, Pass::scale, DType::f16, columns, columns, options);
}

bool serves_single_tile(const Family& family, int arch, const Options& options, int head_dim, int value_head_dim) {
  const int largest = std::max(head_dim, value_head_dim);
  return only_causal(options) && head_dim % 16 == 0 && value_head_dim % 16 == 0 &&
         find_tile_row(pass_family(family, arch, 1, Pass::forward_single_tile, largest).name, 1,
                       Pass::forward_single_tile, largest, arch);
}

bool serves_split_kv(const Family& family, int arch, const Problem& p, const SplitKvPlan& plan) {
  const int limbs = p.options.highest_precision ? 2 : 1, largest = std::max(p.head_dim, p.value_head_dim);
  const char* const of = pass_family(family, arch, limbs, Pass::forward_split_kv, largest).name;
  return plan.rows && (!p.options.has_kv_rows || p.options.has_descale) &&
         find_tile_row(of, limbs, Pass::forward_split_kv, largest, arch, calls_of(p.options), plan.rows);
}

Choice choose(int arch, Pass pass, int head_dim, const std::string& gpu, bool functions) {
  Options options{};
  if (functions) options.functions = "";
  const Variant variant = variant_of(served_family(arch), arch, pass, DType::f16, head_dim, head_dim, options, 0, gpu);
  return {variant.family, variant.tile, variant.tuned, 1024 * shared_kb_of(arch)};
}

std::vector<std::string> float16_families() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) {
    if (family.float16_only) names.push_back(family.name);
  }
  return names;
}

bool separate_dq(int arch, int largest_head_dim) {
  return separate_dq(served_family(arch), Options{}, largest_head_dim);
}

namespace {

// Whether a call has no option but a window, of so few keys that adding dQ in order costs less than the zeros that it
// saves. Of windows beyond a quarter of the keys blocks wait for one another as under causal alone: up to 1.16 times as
// long where blocks are few.
bool in_short_window(const Problem& p) {
  Options others = p.options;
  others.window_left = others.window_right = Options{}.window_left;
  const int64_t keys = int64_t{p.options.window_left} + (p.options.causal ? 0 : p.options.window_right);
  return only_causal(others) && keys <= std::min<int64_t>(p.options.causal ? 2048 : 1024, p.kv_length / 4);
}

}  // namespace

bool orders_dq(int arch, const Problem& p) {
  Options options = p.options;
  options.ordered_dq = true;
  const int largest = std::max(p.head_dim, p.value_head_dim);
  // Blocks that walk over several heads are long. Under a window or of packed sequences they go upwards, the longest
  // last: such calls took up to 1.3 times as long as in any order. And of short ones all blocks of a head begin at once
  // and wait: at head_dim 128 and 512 rows that took 6% longer.
  const bool grouped = p.q_heads > p.kv_heads;
  const bool wait = (options.causal && grouped && (bounded_left(options) || options.has_cu_q_lengths)) ||
                    (p.q_length <= 512 && largest > 64);
  const bool wanted = options.separate_dq || (in_short_window(p) && !grouped);
  return wanted && !wait && orders_dq(served_family(arch), options, largest);
}

bool lists_keys(int arch, Pass pass, const Problem& p) {
  return !(pass == Pass::forward && serves_split_kv(served_family(arch), arch, p, plan_split_kv(p)));
}

int largest_head_dim(int arch, bool highest_precision) {
  const Family& family = served_family(arch);
  for (int head_dim = 256; head_dim > 0; head_dim -= 8) {
    bool served = true;
    for (Pass pass : {Pass::forward, Pass::backward, Pass::backward_dq, Pass::backward_bias}) {
      const int limbs = highest_precision ? 2 : 1;
      served =
          served && find_tile_row(pass_family(family, arch, limbs, pass, head_dim).name, limbs, pass, head_dim, arch);
    }
    if (served) return head_dim;
  }
  return 0;
}

}  // namespace jax_flash::cuda
