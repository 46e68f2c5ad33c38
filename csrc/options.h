// THE field list: every option of attention() once, with its type.
//
// The Python side passes the record by name (`Options` and `OPERANDS` in jax_flash/_call/options.py), the FFI handlers
// decode it by name, and the CUDA side prints it as named constants into the kernel's source.
//
//   CONSTANT(type, name)         known when the call is traced; compiled into a CUDA kernel as `option_<name>`
//   VALUE(type, name)            known when the call is traced; read at run time as `problem.options.<name>`
//   FEATURE(type, name, absent)  a VALUE that may be absent, which it is when it equals `absent`; a CUDA kernel is
//                                compiled with `with_<name>`
//   OPERAND(type, name, dims)    an optional array: `problem.<name>`, null when absent; a CUDA kernel is compiled with
//                                `has_<name>`
//   PLAIN(type, name, dims)      an OPERAND with which a call is still plain: is_plain() in cuda/tiles.h
//   TRAINABLE(type, name, dims)  an OPERAND with a gradient: the backward pass adds it to `problem.d<name>`, null when
//                                nobody asks for it; a CUDA kernel is compiled with `has_d<name>`
//
// `dims` has a letter for each dimension: b batch, d sequences, e sequences + 1, n query heads, k key heads, t and s
// lengths, i and j lengths in blocks of kSegmentBlock, x and y in blocks of mask_blocks, h head_dim, v value_head_dim,
// 2 a pair, 4 and 8 records.
// Arrays are dense and row-major. One that has `<name>_strides` in Problem may have size 1 in any dimension, which is
// then broadcast.
//
// A `void` array is float32, or float64 for float64 inputs. One that has a CONSTANT `wide_<name>` is so where that is
// true, and has the query's dtype where it is false. An `Original` array is float32, or bfloat16 with
// original_bfloat16.
//
// A *sequence* is a range of the packed rows of one batch entry that attends to itself alone (attention_varlen). A
// batch entry is one sequence unless cu_q_lengths and cu_kv_lengths say otherwise.
//
// This header is compiled by the host compiler and by NVRTC, so it includes nothing.
#pragma once

#define JAX_FLASH_FIELDS(CONSTANT, VALUE, FEATURE, OPERAND, PLAIN, TRAINABLE)                                        \
  /* keep key position <= query position */                                                                          \
  CONSTANT(bool, causal)                                                                                             \
  /* float32 products at float32 accuracy rather than TF32's; false for other dtypes. With descale: the float16 */   \
  /* arrays have two limbs, side by side in every row */                                                             \
  CONSTANT(bool, highest_precision)                                                                                  \
  /* bias is float32 (float64 for float64 inputs); else it has the query's dtype */                                  \
  CONSTANT(bool, wide_bias)                                                                                          \
  /* dQ has a pass of its own, and the gradient of a bias that blocks share: every sum has one order. */             \
  /* false allows that where it costs nothing */                                                                     \
  CONSTANT(bool, separate_dq)                                                                                        \
  /* with separate_dq: scratch has an accumulator of dQ too, and kernels that can add to it in one order, that */    \
  /* of their blocks, need no pass of its own */                                                                     \
  CONSTANT(bool, ordered_dq)                                                                                         \
  /* the originals of float16 arrays are bfloat16 rather than float32: see descale */                                \
  CONSTANT(bool, original_bfloat16)                                                                                  \
  /* gradients of captured arrays are sums in digits, whose order changes nothing: see kSumDigits */                 \
  CONSTANT(bool, exact_sums)                                                                                         \
  /* of a backward pass: out and lse are those of more keys than these, whose weights so do not sum to 1 */          \
  VALUE(bool, partial_keys)                                                                                          \
  /* multiplies the scores; finite and > 0 (Python folds sign and zero into the query). 1 with traced_scale */       \
  VALUE(double, scale)                                                                                               \
  /* of a batch entry, >= 1 */                                                                                       \
  VALUE(int, sequences)                                                                                              \
  /* keep key position >= query position - window_left and <= query position + window_right; >= 0 */                 \
  FEATURE(int, window_left, 2147483647)                                                                              \
  FEATURE(int, window_right, 2147483647)                                                                             \
  /* scores become softcap * tanh(scores / softcap) */                                                               \
  FEATURE(double, softcap, 0)                                                                                        \
  /* weights are dropped with probability round(65536 * dropout_rate) / 65536: see dropout_seeds */                  \
  FEATURE(double, dropout_rate, 0)                                                                                   \
  /* multiplies the scores in place of `scale`; > 0 */                                                               \
  PLAIN(void, traced_scale, "b")                                                                                     \
  /* window_left and window_right in place of these, which are absent then; of either sign, 2147483647: no limit */  \
  OPERAND(int, window_bounds, "b2")                                                                                  \
  /* position of query row 0 of a sequence, whose keys begin at position 0; absent means 0 */                        \
  PLAIN(int, q_offset, "bd")                                                                                         \
  /* rows from these on are padding: never read, results 0, lse as of a row that keeps no key; >= 0 */               \
  PLAIN(int, q_lengths, "b")                                                                                         \
  PLAIN(int, kv_lengths, "b")                                                                                        \
  /* the row of key and value, and of their gradients, that is key j of a batch entry: first the kv_lengths that */  \
  /* are kept, ascending, then all others. Where no option asks which key one is, and lists_keys() says so */        \
  PLAIN(int, kv_rows, "bs")                                                                                          \
  /* sequence d has rows [cu[d], cu[d + 1]); rows from cu[sequences] on are in none, and are padding */              \
  OPERAND(int, cu_q_lengths, "be")                                                                                   \
  OPERAND(int, cu_kv_lengths, "be")                                                                                  \
  /* keep pairs of equal segments */                                                                                 \
  OPERAND(int, q_segment_ids, "bt")                                                                                  \
  OPERAND(int, kv_segment_ids, "bs")                                                                                 \
  /* smallest and largest segment in each block of kSegmentBlock rows; there with the segment ids */                 \
  OPERAND(int, q_segment_ranges, "bi2")                                                                              \
  OPERAND(int, kv_segment_ranges, "bj2")                                                                             \
  /* with score and mask functions (struct Options): rows and keys of a block of mask_blocks; 1 without one */       \
  VALUE(int, mask_block_rows)                                                                                        \
  VALUE(int, mask_block_keys)                                                                                        \
  /* the arrays that these functions captured, which follow the operands; and how many of them have gradients, */    \
  /* which follow those of operands */                                                                               \
  VALUE(int, captured)                                                                                               \
  VALUE(int, dcaptured)                                                                                              \
  /* kinds of blocks of pairs, counted from the first row and key of a sequence: 0 no pair is kept, 1 the partial */ \
  /* mask of the functions decides, 2 all are kept */                                                                \
  OPERAND(Int8, mask_blocks, "bdnxy")                                                                                \
  /* what batch entries and query heads count from, for score and mask functions; absent means 0 */                  \
  OPERAND(int, index_offsets, "2")                                                                                   \
  /* keep keys [start, end) of each row, and rows [start, end) of each key; they count from the first of their */    \
  /* sequence. In [0, length], empty where start >= end */                                                           \
  OPERAND(int, kv_intervals, "bnt2")                                                                                 \
  OPERAND(int, q_intervals, "bns2")                                                                                  \
  /* of the intervals of each block of kSegmentBlock rows or keys: smallest start and largest end of those that */   \
  /* are not empty, largest start and smallest end of all; there with the intervals */                               \
  OPERAND(int, kv_interval_ranges, "bni4")                                                                           \
  OPERAND(int, q_interval_ranges, "bnj4")                                                                            \
  /* keep pairs where true */                                                                                        \
  OPERAND(bool, mask, "bnts")                                                                                        \
  /* the key of the counter-based generator, one per head; there with dropout_rate */                                \
  OPERAND(unsigned, dropout_seeds, "bdn2")                                                                           \
  /* a ScaleRecord (scaling.h) for each key head: query, key, value and dout are float16 arrays that stand for */    \
  /* float32 ones, and the originals are there too. Results are float32 */                                           \
  PLAIN(float, descale, "bk8")                                                                                       \
  PLAIN(Original, original_query, "btnh")                                                                            \
  PLAIN(Original, original_key, "bskh")                                                                              \
  PLAIN(Original, original_value, "bskv")                                                                            \
  PLAIN(Original, original_dout, "btnv")                                                                             \
  /* exp(sink) joins the sum of exponentials */                                                                      \
  PLAIN(void, sinks, "bn")                                                                                           \
  /* scores become scores - slope * |query position - key position| */                                               \
  TRAINABLE(void, alibi_slopes, "bdn")                                                                               \
  /* added to the scores */                                                                                          \
  TRAINABLE(void, bias, "bnts")

// The fields where it does not matter which operands are PLAIN.
#define JAX_FLASH_OPTIONS(CONSTANT, VALUE, FEATURE, OPERAND, TRAINABLE) \
  JAX_FLASH_FIELDS(CONSTANT, VALUE, FEATURE, OPERAND, OPERAND, TRAINABLE)

namespace jax_flash {

constexpr int kSegmentBlock = 32;
using Int8 = signed char;
struct Original;  // an element of an array whose dtype is known where it is read

#define JAX_FLASH_FIELD(type, name) type name;
#define JAX_FLASH_FEATURE(type, name, absent) type name = absent;
#define JAX_FLASH_PRESENCE(type, name, dims) bool has_##name;
#define JAX_FLASH_PRESENCES(type, name, dims) bool has_##name, has_d##name;
struct Options {
  JAX_FLASH_OPTIONS(JAX_FLASH_FIELD, JAX_FLASH_FIELD, JAX_FLASH_FEATURE, JAX_FLASH_PRESENCE, JAX_FLASH_PRESENCES)
  // The source of the call's score and mask functions (jax_flash/_functions/cuda.py), compiled into CUDA kernels. On
  // the host one pointer for equal texts, which lives as long as the process; null: none.
  const char* functions = nullptr;
};
#undef JAX_FLASH_PRESENCES
#undef JAX_FLASH_PRESENCE
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_FIELD

}  // namespace jax_flash
