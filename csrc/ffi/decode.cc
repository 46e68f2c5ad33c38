#include "ffi/decode.h"

#include <limits>
#include <sstream>
#include <type_traits>

namespace jax_flash {

void require(bool condition, const std::string& what) {
  if (!condition) throw std::invalid_argument(what);
}

void require_count(size_t expected, size_t got, const char* what) {
  if (got == expected) return;
  throw std::invalid_argument("the call must have " + std::to_string(expected) + " " + what + ", got " +
                              std::to_string(got));
}

int narrow(int64_t value, const char* what) {
  if (value < 1 || value > std::numeric_limits<int>::max()) {
    throw std::invalid_argument(std::string(what) + " must be in [1, 2^31), got " + std::to_string(value));
  }
  return static_cast<int>(value);
}

static std::string described(ffi::DataType type, Sizes sizes) {
  std::ostringstream text;
  text << type << "[";
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  return text.str() + "]";
}

void check(const ffi::AnyBuffer& buffer, ffi::DataType type, Sizes sizes, const char* name, bool broadcast) {
  Sizes got = buffer.dimensions();
  bool good = buffer.element_type() == type && got.size() == sizes.size();
  for (size_t i = 0; good && i < sizes.size(); ++i) good = got[i] == sizes[i] || (broadcast && got[i] == 1);
  if (!good) {
    throw std::invalid_argument(std::string(name) + " must be " + described(type, sizes) +
                                (broadcast ? ", where dimensions may be 1" : "") + ", got " +
                                described(buffer.element_type(), got));
  }
}

ffi::AnyBuffer argument(ffi::RemainingArgs args, size_t index) {
  auto value = args.get<ffi::AnyBuffer>(index);
  if (!value.has_value()) throw std::invalid_argument(value.error().message());
  return *value;
}

ffi::AnyBuffer result(ffi::RemainingRets rets, size_t index) {
  auto value = rets.get<ffi::AnyBuffer>(index);
  if (!value.has_value()) throw std::invalid_argument(value.error().message());
  return **value;
}

namespace {

DType decode_dtype(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16: return DType::f16;
    case ffi::DataType::BF16: return DType::bf16;
    case ffi::DataType::F32: return DType::f32;
    case ffi::DataType::F64: return DType::f64;
    default: throw std::invalid_argument("query must be float16, bfloat16, float32 or float64");
  }
}

// The dtype of accumulators, statistics, sinks, slopes and the gradients of trainable operands.
ffi::DataType wide(ffi::DataType type) { return type == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32; }

// XLA's buffers are dense and row-major.
Tensor tensor(const ffi::AnyBuffer& buffer, int batch, int length, int heads, int head_dim, ffi::DataType type,
              const char* name) {
  const int64_t sizes[] = {batch, length, heads, head_dim};
  check(buffer, type, {sizes, 4}, name);
  int64_t row = static_cast<int64_t>(heads) * head_dim;
  return Tensor{buffer.untyped_data(), row * length, row, head_dim};
}

void* statistic(const ffi::AnyBuffer& buffer, const Problem& p, ffi::DataType type, const char* name) {
  const int64_t sizes[] = {p.batch, p.q_heads, p.q_length};
  check(buffer, wide(type), {sizes, 3}, name);
  return buffer.untyped_data();
}

int64_t blocks_of_mask(int length, int size) {
  require(size >= 1, "blocks of mask_blocks must have a row and a key at least");
  return (static_cast<int64_t>(length) + size - 1) / size;
}

int64_t extent(char dim, const Problem& p) {
  auto blocks = [](int length) { return (static_cast<int64_t>(length) + kSegmentBlock - 1) / kSegmentBlock; };
  switch (dim) {
    case 'b': return p.batch;
    case 'd': return p.options.sequences;
    case 'e': return int64_t{p.options.sequences} + 1;
    case 'n': return p.q_heads;
    case 'k': return p.kv_heads;
    case 'h': return p.head_dim;
    case 'v': return p.value_head_dim;
    case '8': return 8;
    case 't': return p.q_length;
    case 's': return p.kv_length;
    case 'i': return blocks(p.q_length);
    case 'j': return blocks(p.kv_length);
    case 'x': return blocks_of_mask(p.q_length, p.options.mask_block_rows);
    case 'y': return blocks_of_mask(p.kv_length, p.options.mask_block_keys);
    case '2': return 2;
    case '4': return 4;
    default: throw std::logic_error("an operand has a dimension of no meaning");
  }
}

// The elements of an operand whose dimensions are `dims` of options.h. With `broadcast`, dimensions of size 1 are
// allowed and the strides are written there.
template <typename To>
void* operand(const ffi::AnyBuffer& buffer, const Problem& p, const std::string& dims, ffi::DataType type,
              const char* name, To broadcast) {
  int64_t sizes[5];
  for (size_t i = 0; i < dims.size(); ++i) sizes[i] = extent(dims[i], p);
  check(buffer, type, {sizes, dims.size()}, name, broadcast != nullptr);
  Sizes got = buffer.dimensions();
  if constexpr (std::is_same_v<To, Strides*>) *broadcast = strides({got.begin(), got.end()});
  if constexpr (std::is_same_v<To, BlockStrides*>) {
    const Strides of = strides({got.begin() + 1, got.end()});
    *broadcast = {got[0] == 1 ? 0 : got[1] * got[2] * got[3] * got[4], of.batch, of.head, of.row, of.column};
  }
  return buffer.untyped_data();
}

ffi::DataType type_of(const signed char*, ffi::DataType, const Options&) { return ffi::DataType::S8; }
ffi::DataType type_of(const int*, ffi::DataType, const Options&) { return ffi::DataType::S32; }
ffi::DataType type_of(const unsigned*, ffi::DataType, const Options&) { return ffi::DataType::U32; }
ffi::DataType type_of(const float*, ffi::DataType, const Options&) { return ffi::DataType::F32; }
ffi::DataType type_of(const bool*, ffi::DataType, const Options&) { return ffi::DataType::PRED; }
ffi::DataType type_of(const void*, ffi::DataType element, const Options&) { return wide(element); }
ffi::DataType type_of(const Original*, ffi::DataType, const Options& options) {
  return options.original_bfloat16 ? ffi::DataType::BF16 : ffi::DataType::F32;
}

}  // namespace

Strides strides(const std::vector<int64_t>& sizes) {
  int64_t all[4], stride = 1;
  for (int i = 3; i >= 0; --i) {
    all[i] = sizes.at(i) == 1 ? 0 : stride;
    stride *= sizes[i];
  }
  return {all[0], all[1], all[2], all[3]};
}

int limbs_of(const Options& options) { return options.has_descale && options.highest_precision ? 2 : 1; }

Call decode(Platform platform, Pass pass, const Options& options, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Call call{};
  Problem& p = call.problem;
  p.options = options;
  p.scale = static_cast<float>(options.scale);
  ffi::AnyBuffer q = argument(args, 0), k = argument(args, 1), v = argument(args, 2);
  ffi::DataType type = q.element_type();
  call.dtype = decode_dtype(type);
  require(q.dimensions().size() == 4 && k.dimensions().size() == 4 && v.dimensions().size() == 4,
          "query, key and value must have rank 4");
  p.batch = narrow(q.dimensions()[0], "batch");
  p.q_length = narrow(q.dimensions()[1], "query length");
  p.q_heads = narrow(q.dimensions()[2], "query heads");
  p.head_dim = narrow(q.dimensions()[3], "head_dim");
  p.kv_length = narrow(k.dimensions()[1], "key length");
  p.kv_heads = narrow(k.dimensions()[2], "key heads");
  p.value_head_dim = narrow(v.dimensions()[3], "value_head_dim");
  narrow(options.sequences, "sequences");
  require(static_cast<int64_t>(p.q_length) + p.kv_length <= std::numeric_limits<int>::max(),
          "query and key lengths must add up to less than 2^31");
  require(p.q_heads % p.kv_heads == 0, "query heads must be a multiple of key heads");

  const int limbs = limbs_of(options);
  p.head_dim /= limbs;
  p.value_head_dim /= limbs;
  const ffi::DataType result_type = options.has_descale ? ffi::DataType::F32 : type;
  auto on_queries = [&](const ffi::AnyBuffer& buffer, int head_dim, ffi::DataType element, const char* name) {
    return tensor(buffer, p.batch, p.q_length, p.q_heads, head_dim, element, name);
  };
  auto on_keys = [&](const ffi::AnyBuffer& buffer, int head_dim, ffi::DataType element, const char* name) {
    return tensor(buffer, p.batch, p.kv_length, p.kv_heads, head_dim, element, name);
  };
  p.q = on_queries(q, limbs * p.head_dim, type, "query");
  p.k = on_keys(k, limbs * p.head_dim, type, "key");
  p.v = on_keys(v, limbs * p.value_head_dim, type, "value");
  size_t next = 3;
  size_t results = 2;
  if (pass == Pass::forward) {
    p.out = on_queries(result(rets, 0), p.value_head_dim, result_type, "out");
    p.lse = statistic(result(rets, 1), p, type, "lse");
  } else {
    p.dout = on_queries(argument(args, next++), limbs * p.value_head_dim, type, "dout");
    p.lse = statistic(argument(args, next++), p, type, "lse");
    if (platform == Platform::cpu) {
      p.dlse = statistic(argument(args, next++), p, type, "dlse");
      p.out = on_queries(argument(args, next++), p.value_head_dim, type, "out");
    } else {
      p.delta = statistic(argument(args, next++), p, type, "delta");
    }
    p.dq = on_queries(result(rets, 0), p.head_dim, result_type, "dq");
    p.dk = on_keys(result(rets, 1), p.head_dim, result_type, "dk");
    p.dv = on_keys(result(rets, 2), p.value_head_dim, result_type, "dv");
    results = 3;
  }
#define JAX_FLASH_CONSTANT(type_, name)
#define JAX_FLASH_FEATURE(type_, name, absent)
#define JAX_FLASH_OPERAND(type_, name, dims)                                                             \
  if (options.has_##name) {                                                                              \
    const bool* const is_wide = JAX_FLASH_FIND(options, wide_##name);                                    \
    const ffi::DataType element = is_wide && !*is_wide ? type : type_of(p.name, type, options);          \
    const auto found = JAX_FLASH_FIND(p, name##_strides);                                                \
    p.name = static_cast<const type_*>(operand(argument(args, next++), p, dims, element, #name, found)); \
  }
#define JAX_FLASH_TRAINABLE(type_, name, dims)                                           \
  JAX_FLASH_OPERAND(type_, name, dims)                                                   \
  if (options.has_d##name) {                                                             \
    const auto found = JAX_FLASH_FIND(p, d##name##_strides);                             \
    p.d##name = operand(result(rets, results++), p, dims, wide(type), "d" #name, found); \
  }
  JAX_FLASH_OPTIONS(JAX_FLASH_CONSTANT, JAX_FLASH_CONSTANT, JAX_FLASH_FEATURE, JAX_FLASH_OPERAND, JAX_FLASH_TRAINABLE)
#undef JAX_FLASH_TRAINABLE
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_CONSTANT
  require(options.sequences == 1 || (options.has_cu_q_lengths && options.has_cu_kv_lengths),
          "sequences need cu_q_lengths and cu_kv_lengths");
  require(!options.has_kv_rows || options.has_kv_lengths, "kv_rows need kv_lengths");
  // The functions' source knows the shapes of what they capture.
  require(options.captured >= 0 && options.captured <= kMostCaptured,
          "captured must be in [0, " + std::to_string(kMostCaptured) + "], got " + std::to_string(options.captured));
  require(options.dcaptured >= 0 && options.dcaptured <= options.captured,
          "dcaptured must be in [0, captured], got " + std::to_string(options.dcaptured));
  for (int i = 0; i < options.captured; ++i) p.captured[i] = argument(args, next++).untyped_data();
  for (int i = 0; i < options.dcaptured; ++i) {
    ffi::AnyBuffer gradient = result(rets, results++);
    const ffi::DataType element = options.exact_sums ? ffi::DataType::U32 : ffi::DataType::F32;
    check(gradient, element, gradient.dimensions(), "the gradient of a captured array");
    p.dcaptured[i] = gradient.untyped_data();
    p.dcaptured_elements[i] = static_cast<long long>(gradient.element_count());
  }
  if (rets.size() == results + 1) {
    ffi::AnyBuffer buffer = result(rets, results++);
    check(buffer, wide(type), buffer.dimensions(), "scratch");
    call.scratch_elements = static_cast<int64_t>(buffer.element_count());
    p.scratch = call.scratch_elements ? buffer.untyped_data() : nullptr;
  }
  require_count(next, args.size(), "arguments");
  require_count(results, rets.size(), "results");
  return call;
}

}  // namespace jax_flash
