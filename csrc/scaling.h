// Scaling: what the kernels read that make float16 arrays of float32 ones (cuda/device/scale.cuh). Compiled by the host
// compiler and by NVRTC, so it includes nothing.
#pragma once

namespace jax_flash {

constexpr int kScaleWarps = 16;  // of a block that has all rows of an array and key head
constexpr int kChunkWarps = 8;   // of a block that has a chunk of one
constexpr int kScaledColumns = 256;

// A dense [batch, length, heads, columns] array.
struct ScaledArray {
  const void* original;    // float, or bfloat16
  unsigned short* scaled;  // float16, with twice the columns for two limbs
  const bool* kept;        // [batch, length, heads]: rows that are in some pair; null: all are. Others become zeros
  const int* list;         // [batch, length]: the row of `original` that a row is made of; null: its own
  int length;
  int heads;    // a multiple of kv_heads
  int columns;  // a multiple of 8, up to kScaledColumns
};

// What is known of the rows of a key head, or of a part of them: of an array's rows the largest and the smallest size,
// where a row's size is the largest of its finite magnitudes, and rows of zeros have none; the largest Euclidean norm,
// for two limbs; and of gradients the largest delta and the sizes of dS's rows.
struct RowSizes {
  float largest, smallest;
  float norm;
  float delta;
  float largest_ds, smallest_ds;
};

// A record of Problem::descale: of a key head and the query heads that attend to it.
struct ScaleRecord {
  // Each undoes its array's scale. 0: the array's rows differ too much for one scale, so that the head is computed in
  // float32. Every array has its own, so that the blocks that find them need not wait for each other.
  float query, key, value, dout;
  float ds;             // the scale of dS
  float largest_value;  // the largest size of a row of value
  float value_norm;     // and Euclidean norm, for two limbs
  float unused;         // a record has a sector of memory
};

struct Scaling {
  int batch;
  int kv_heads;
  int count;  // of arrays: query, key, value; or dout
  ScaledArray arrays[3];
  int chunks;            // into which the rows of an array and key head are divided, a block each
  RowSizes* sizes;       // [batch, kv_heads, count, chunks]: scratch
  ScaleRecord* records;  // [batch, kv_heads], written
  // For gradients, else null: the records of query, key and value; and [batch, heads, length].
  const ScaleRecord* of_inputs;
  const float* delta;
  int value_head_dim;
  float dropout_factor;  // what dropout multiplies the weights with that it keeps
};

}  // namespace jax_flash
