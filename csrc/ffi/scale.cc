// The call that makes float16 arrays of float32 ones (scaling.h).
#include <cstdint>

#include "cuda/host/cuda.h"
#include "ffi/decode.h"
#include "ffi/handlers.h"
#include "scaling.h"

namespace jax_flash {
namespace {

struct ScaleOptions {
  bool gradients, highest_precision, has_q_kept, has_kv_kept, has_kv_rows;
  float dropout_factor;  // for gradients: what dropout multiplies the weights with that it keeps
};

struct ScaleCall {
  Scaling scaling;
  bool bfloat16;
};

// inputs:    (query, key, value[, q_kept][, kv_kept][, kv_rows]) -> (query, key, value in float16, records, sizes)
// gradients: (dout, delta, records of the inputs[, q_kept]) -> (dout in float16, records, sizes)
ScaleCall decode_scale(const ScaleOptions& options, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  ScaleCall call{};
  Scaling& s = call.scaling;
  s.count = options.gradients ? 1 : 3;
  const ffi::AnyBuffer first = argument(args, 0), records = result(rets, s.count), sizes = result(rets, s.count + 1);
  const ffi::DataType type = first.element_type();
  call.bfloat16 = type == ffi::DataType::BF16;
  require(call.bfloat16 || type == ffi::DataType::F32, "arrays to be scaled must be float32 or bfloat16");
  require(first.dimensions().size() == 4 && records.dimensions().size() == 3 && sizes.dimensions().size() == 5,
          "an array to be scaled, its records and sizes must have rank 4, 3 and 5");
  const int64_t batch = first.dimensions()[0], kv_heads = records.dimensions()[1], chunks = sizes.dimensions()[3];
  auto record_of = [&](const ffi::AnyBuffer& buffer, const char* name) {
    constexpr int64_t kFields = sizeof(ScaleRecord) / sizeof(float);
    const int64_t wanted[] = {batch, kv_heads, kFields};
    check(buffer, ffi::DataType::F32, {wanted, 3}, name);
    return static_cast<ScaleRecord*>(buffer.untyped_data());
  };
  s.batch = narrow(batch, "batch");
  s.kv_heads = narrow(kv_heads, "key heads");
  s.chunks = narrow(chunks, "chunks");
  s.records = record_of(records, "records");
  const int64_t of_sizes[] = {batch, kv_heads, s.count, chunks, int64_t{sizeof(RowSizes) / sizeof(float)}};
  check(sizes, ffi::DataType::F32, {of_sizes, 5}, "sizes");
  s.sizes = static_cast<RowSizes*>(sizes.untyped_data());
  for (int i = 0; i < s.count; ++i) {
    const ffi::AnyBuffer original = argument(args, i);
    const auto got = original.dimensions();
    require(got.size() == 4, "arrays to be scaled must have rank 4");
    int64_t wanted[] = {batch, got[1], got[2], got[3]};
    check(original, type, {wanted, 4}, "an array to be scaled");
    ScaledArray& array = s.arrays[i];
    array.original = original.untyped_data();
    array.length = narrow(got[1], "length");
    array.heads = narrow(got[2], "heads");
    array.columns = narrow(got[3], "head_dim");
    require(array.heads % s.kv_heads == 0, "heads must be a multiple of key heads");
    require(array.columns % 8 == 0 && array.columns <= kScaledColumns, "head_dim must be a multiple of 8, at most 256");
    narrow(got[1] * got[2], "length times heads");
    wanted[3] *= options.highest_precision ? 2 : 1;
    const ffi::AnyBuffer scaled = result(rets, i);
    check(scaled, ffi::DataType::F16, {wanted, 4}, "a scaled array");
    array.scaled = static_cast<unsigned short*>(scaled.untyped_data());
  }
  size_t next = s.count;
  s.dropout_factor = options.dropout_factor;
  if (options.gradients) {
    const ScaledArray& dout = s.arrays[0];
    const ffi::AnyBuffer delta = argument(args, next++);
    const int64_t wanted[] = {batch, dout.heads, dout.length};
    check(delta, ffi::DataType::F32, {wanted, 3}, "delta");
    s.delta = static_cast<const float*>(delta.untyped_data());
    s.of_inputs = record_of(argument(args, next++), "records of the inputs");
    s.value_head_dim = dout.columns;
  }
  auto kept = [&](ScaledArray& array, const char* name) {
    const ffi::AnyBuffer buffer = argument(args, next++);
    const int64_t wanted[] = {batch, array.length, array.heads};
    check(buffer, ffi::DataType::PRED, {wanted, 3}, name);
    return static_cast<const bool*>(buffer.untyped_data());
  };
  if (options.has_q_kept) s.arrays[0].kept = kept(s.arrays[0], "q_kept");
  if (options.has_kv_kept && !options.gradients) s.arrays[1].kept = s.arrays[2].kept = kept(s.arrays[1], "kv_kept");
  if (options.has_kv_rows && !options.gradients) {
    const ffi::AnyBuffer rows = argument(args, next++);
    const int64_t wanted[] = {batch, s.arrays[1].length};
    check(rows, ffi::DataType::S32, {wanted, 2}, "kv_rows");
    s.arrays[1].list = s.arrays[2].list = static_cast<const int*>(rows.untyped_data());
  }
  require_count(next, args.size(), "arguments");
  require_count(s.count + 2, rets.size(), "results");
  return call;
}

ffi::Error prepare(int32_t device, bool gradients, bool highest_precision, bool has_q_kept, bool has_kv_kept,
                   bool has_kv_rows, float dropout_factor, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    const ScaleOptions options{gradients, highest_precision, has_q_kept, has_kv_kept, has_kv_rows, dropout_factor};
    const ScaleCall call = decode_scale(options, args, rets);
    cuda::prepare_scale(device, highest_precision, call.bfloat16, call.scaling);
  });
}

ffi::Error run(cuda::Stream stream, int32_t device, bool gradients, bool highest_precision, bool has_q_kept,
               bool has_kv_kept, bool has_kv_rows, float dropout_factor, ffi::RemainingArgs args,
               ffi::RemainingRets rets) {
  return guarded([&] {
    const ScaleOptions options{gradients, highest_precision, has_q_kept, has_kv_kept, has_kv_rows, dropout_factor};
    const ScaleCall call = decode_scale(options, args, rets);
    cuda::launch_scale(device, stream, highest_precision, call.bfloat16, call.scaling);
  });
}

#define JAX_FLASH_SCALE_ATTRIBUTES     \
  Attr<bool>("gradients")              \
      .Attr<bool>("highest_precision") \
      .Attr<bool>("has_q_kept")        \
      .Attr<bool>("has_kv_kept")       \
      .Attr<bool>("has_kv_rows")       \
      .Attr<float>("dropout_factor")   \
      .RemainingArgs()                 \
      .RemainingRets()

XLA_FFI_DEFINE_HANDLER(
    kPrepare, prepare,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>().JAX_FLASH_SCALE_ATTRIBUTES);
XLA_FFI_DEFINE_HANDLER(
    kRun, run,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>().Ctx<ffi::DeviceOrdinal>().JAX_FLASH_SCALE_ATTRIBUTES,
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

ScaleHandlers scale_handlers() { return {kPrepare, kRun}; }

}  // namespace jax_flash
