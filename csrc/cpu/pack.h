// Copies between the caller's arrays and the tiles: converted to the type of the computation, padded, transposed.
#pragma once

#include <utility>

#include "gemm.h"

namespace jax_flash::cpu::JAX_FLASH_ISA {

// Prefetches the rows that will be read or written next, a few cache lines at a time between the current products. Only
// rows far apart, as those of one head of many: that gives 1.02 to 1.05 times the forward's rate if they begin 3 KB
// apart or more, 1.00 to 1.01 at 2 KB, but 0.98 at 1 KB, where hardware prefetching suffices. Into L1, though it holds
// only some of them: 1.02 to 1.06 times the rate of prefetching into L2 alone.
constexpr int64_t kCacheLine = 64, kFarApart = 2048;  // bytes
enum class Access { read, write };
class RowsAhead {
 public:
  RowsAhead() = default;
  // All rows are prefetched once step() has been called `steps` times.
  template <typename E>
  RowsAhead(const E* rows, int64_t stride, int64_t count, int64_t columns, int64_t steps, Access access = Access::read)
      : row_(reinterpret_cast<const char*>(rows)),
        stride_(stride * int64_t{sizeof(E)}),
        bytes_(columns * int64_t{sizeof(E)}),
        rows_(stride_ < kFarApart ? 0 : count),
        lines_((rows_ * ((bytes_ + kCacheLine - 1) / kCacheLine) + steps - 1) / steps),
        access_(access) {}

  JAX_FLASH_INLINE void step() {
    for (int64_t line = 0; line < lines_ && rows_ > 0; ++line) {
      if (access_ == Access::write) {
        __builtin_prefetch(row_ + at_, 1, 3);
      } else {
        __builtin_prefetch(row_ + at_, 0, 3);
      }
      at_ += kCacheLine;
      if (at_ < bytes_) continue;
      at_ = 0;
      row_ += stride_;
      --rows_;
    }
  }

 private:
  const char* row_ = nullptr;
  int64_t stride_ = 0, bytes_ = 0, rows_ = 0;
  int64_t lines_ = 0;  // of a step
  int64_t at_ = 0;
  Access access_ = Access::read;
};

// Likewise for contiguous memory.
class LinesAhead {
 public:
  LinesAhead() = default;
  LinesAhead(const void* begin, int64_t bytes, int64_t steps)
      : at_(static_cast<const char*>(begin)), bytes_((bytes / steps + kCacheLine - 1) / kCacheLine * kCacheLine) {}

  // Into the cache of level 4 - locality and those further from the core.
  template <Access access, int locality = 3>
  JAX_FLASH_INLINE void step() {
    for (int64_t byte = 0; byte < bytes_; byte += kCacheLine) {
      if constexpr (access == Access::write) {
        __builtin_prefetch(at_ + byte, 1, locality);
      } else {
        __builtin_prefetch(at_ + byte, 0, locality);
      }
    }
    at_ += bytes_;
  }

 private:
  const char* at_ = nullptr;
  int64_t bytes_ = 0;  // of a step
};

// The sum of the products of two rows' elements.
template <typename E>
JAX_FLASH_INLINE Compute<E> dot(const E* a, const E* b, int columns) {
  using T = Compute<E>;
  constexpr int W = kWidth<T>;
  Vec<T> even = T(0), odd = T(0);
  int c = 0;
  for (; c + 2 * W <= columns; c += 2 * W) {
    even = multiply_add(load_as(a + c), load_as(b + c), even);
    odd = multiply_add(load_as(a + c + W), load_as(b + c + W), odd);
  }
  for (int count; (count = columns - c) > 0; c += W) {
    even += count < W ? load_some(a + c, count) * load_some(b + c, count) : load_as(a + c) * load_as(b + c);
  }
  return sum_of_lanes(even + odd);
}

// One row of `columns` elements, zeros up to `padded`, a multiple of kWidth.
template <typename E>
JAX_FLASH_INLINE void copy_row(const E* from, int columns, int padded, Compute<E>* to) {
  constexpr int W = kWidth<Compute<E>>;
  int c = 0;
  for (; c + W <= columns; c += W) store(to + c, load_as(from + c));
  if (c < columns) {
    store(to + c, load_some(from + c, columns - c));
    c += W;
  }
  for (; c < padded; c += W) store(to + c, Vec<Compute<E>>(0));
}

// `rows` rows of the array, then zero rows up to `padded_rows`.
template <typename E>
void copy_rows(const E* from, ptrdiff_t stride, int rows, int columns, int padded_rows, int padded, Compute<E>* to) {
  for (int r = 0; r < rows; ++r) copy_row(from + r * stride, columns, padded, to + static_cast<ptrdiff_t>(r) * padded);
  std::memset(to + static_cast<ptrdiff_t>(rows) * padded, 0,
              sizeof(Compute<E>) * (padded_rows - rows) * static_cast<ptrdiff_t>(padded));
}

#if defined(JAX_FLASH_PAIRS)
// Pairs along the row, as they lie there; `padded` counts pairs.
JAX_FLASH_INLINE void copy_row(const BFloat16* from, int columns, int padded, Pair* to) {
  std::memcpy(to, from, columns * sizeof(BFloat16));
  std::memset(reinterpret_cast<BFloat16*>(to) + columns, 0, padded * sizeof(Pair) - columns * sizeof(BFloat16));
}
inline void copy_rows(const BFloat16* from, ptrdiff_t stride, int rows, int columns, int padded_rows, int padded,
                      Pair* to) {
  for (int r = 0; r < rows; ++r) copy_row(from + r * stride, columns, padded, to + static_cast<ptrdiff_t>(r) * padded);
  std::memset(to + static_cast<ptrdiff_t>(rows) * padded, 0,
              sizeof(Pair) * (padded_rows - rows) * static_cast<ptrdiff_t>(padded));
}

// Pairs along the column: to[row / 2][column], zeros up to `padded` columns and `padded_rows` rows, an even number.
inline void copy_pairs_of_rows(const BFloat16* from, ptrdiff_t stride, int rows, int columns, int padded_rows,
                               int padded, Pair* to) {
  constexpr int W = kWidth<float>;
  using Two = Native<uint16_t, 2 * W>;
  for (int r = 0; r < padded_rows; r += 2, to += padded) {
    const BFloat16* p = from + r * stride;
    int c = 0;
    if (r + 1 < rows) {
      for (; c + 2 * W <= columns; c += 2 * W) {
        Two a, b;
        std::memcpy(&a, p + c, sizeof(a));
        std::memcpy(&b, p + stride + c, sizeof(b));
        store(to + c, bits_as<U32>(shuffle(a, b, [](int i) { return i % 2 * 2 * W + i / 2; })));
        store(to + c + W, bits_as<U32>(shuffle(a, b, [](int i) { return i % 2 * 2 * W + i / 2 + W; })));
      }
    }
    for (; c < padded; c += W) {
      auto bits = [&](int row) __attribute__((always_inline)) {
        U16 x = {};
        if (row < rows && c < columns) {
          std::memcpy(&x, from + row * stride + c, sizeof(BFloat16) * std::min(columns - c, W));
        }
        return widen_bits(x);
      };
      store(to + c, bits(r) | bits(r + 1) << 16);
    }
  }
}
#endif

// Interleaves the first halves of a and b, or the second ones, `run` lanes at a time.
template <typename T, bool second, int run = 1>
JAX_FLASH_INLINE Vec<T> interleave(const Vec<T>& a, const Vec<T>& b) {
  constexpr int W = kWidth<T>;
  return shuffle(a.lanes, b.lanes,
                 [](int i) { return i / run % 2 * W + i / (2 * run) * run + i % run + (second ? W / 2 : 0); });
}

// The inverse, within each group of lanes: every second `run` lanes of a and then of b, beginning with the first or the
// second ones.
template <typename T, bool second, int part = kWidth<T>, int run = 1>
JAX_FLASH_INLINE Vec<T> every_second(const Vec<T>& a, const Vec<T>& b) {
  constexpr int W = kWidth<T>, kHalf = part / 2;
  return shuffle(a.lanes, b.lanes, [](int i) {
    return i % part / kHalf * W + i / part * part + (i % kHalf / run * 2 + (second ? 1 : 0)) * run + i % run;
  });
}

// Rows become columns: one interleaving of rows i and i + W / 2 for each bit of the index.
template <typename T>
JAX_FLASH_INLINE void transpose(Vec<T> (&x)[kWidth<T>]) {
  constexpr int W = kWidth<T>;
#pragma GCC unroll 4
  for (int stage = 1; stage < W; stage *= 2) {
    Vec<T> y[W];
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; ++i) {
      y[2 * i] = interleave<T, false>(x[i], x[i + W / 2]);
      y[2 * i + 1] = interleave<T, true>(x[i], x[i + W / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) x[i] = y[i];
  }
}

// to[panel][column][kPanel] = from[row][column]: rows (a multiple of kWidth) become lanes. Rows are padded to whole
// vectors. By vectors, because moving elements took a quarter of a call of 64 rows and keys.
template <typename T>
void transpose_to_panels(const T* from, ptrdiff_t stride, int rows, int columns, T* to) {
  using S = Sum<T>;
  constexpr int N = kPanel<S>, W = kWidth<S>;
  for (int first = 0; first < rows; first += N, to += static_cast<ptrdiff_t>(columns) * N) {
    int lanes = rows - first < N ? rows - first : N;
    for (int lane = 0; lane < lanes; lane += W) {
      for (int c = 0; c < columns; c += W) {
        Vec<S> tile[W];
        const T* p = from + (first + lane) * stride + c;
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) tile[i] = bits_as<Vec<S>>(load(p + i * stride));
        transpose<S>(tile);
        int count = columns - c < W ? columns - c : W;
        using Stored = decltype(load(to));
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
          if (i < count) store(to + (c + i) * N + lane, bits_as<Stored>(tile[i]));
        }
      }
    }
  }
}

// to[column][row] = from[row][column], both multiples of kWidth.
template <typename T>
void transpose_rows(const T* from, ptrdiff_t stride, int rows, int columns, ptrdiff_t to_stride, T* to) {
  using S = Sum<T>;
  constexpr int W = kWidth<S>;
  for (int c = 0; c < columns; c += W) {
    for (int r = 0; r < rows; r += W) {
      Vec<S> tile[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) tile[i] = bits_as<Vec<S>>(load(from + (r + i) * stride + c));
      transpose<S>(tile);
      using Stored = decltype(load(to));
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(to + (c + i) * to_stride + r, bits_as<Stored>(tile[i]));
    }
  }
}

// The inverse, for one vector of lanes: to[lane][column] = from[column][kPanel], columns a multiple of kWidth.
template <typename T>
void transpose_from_panel(const T* from, int columns, ptrdiff_t stride, T* to) {
  constexpr int N = kPanel<T>, W = kWidth<T>;
  for (int c = 0; c < columns; c += W) {
    Vec<T> tile[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) tile[i] = load(from + (c + i) * N);
    transpose<T>(tile);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store(to + i * stride + c, tile[i]);
  }
}

template <typename E>
JAX_FLASH_INLINE void store_row(const Compute<E>* from, int columns, Compute<E> factor, E* to) {
  using T = Compute<E>;
  constexpr int W = kWidth<T>;
  int c = 0;
  for (; c + W <= columns; c += W) store_as<E>(to + c, load(from + c) * factor);
  if (c < columns) store_some<E>(to + c, load(from + c) * factor, columns - c);
}

// Allocates consecutive aligned pieces of a workspace; with a null base it only counts, and returns nulls.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  T* take(int64_t elements) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (elements * sizeof(T) + 63) / 64 * 64;
    return p;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// Of an array, for a head.
template <typename E>
struct RowsOfKeys {
  const E* first;
  ptrdiff_t stride;
};

// `count` rows of an array, by their numbers, side by side.
template <typename E>
inline void gather_rows(const E* from, ptrdiff_t stride, int columns, const int* rows, int count, E* to) {
  for (int i = 0; i < count; ++i) std::memcpy(to + int64_t{i} * columns, from + rows[i] * stride, sizeof(E) * columns);
}

}  // namespace jax_flash::cpu::JAX_FLASH_ISA
