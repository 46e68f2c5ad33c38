// Draws problems with any combination of options, runs the CPU kernels on them with one thread and with several, and
// compares the results with each other, bit for bit, and with a plain computation in double.
//
//   driver SECONDS SEED [LARGEST]   prints how many problems it ran; exits with 1 after the first wrong one.
//                                   LARGEST bounds lengths, for slow processors
//
// Every array is an allocation of its exact size, so that a sanitizer sees each access outside of it.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/cpu/cpu.h"
#include "threads.h"

namespace {

using namespace jax_flash;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kAbsent = 2147483647;

// Elements

int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }
double epsilon(DType dtype) {
  return dtype == DType::f64 ? 0x1p-52 : dtype == DType::f32 ? 0x1p-23 : dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
}
DType wide(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

double decode_half(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double magnitude = exponent == 31  ? (mantissa ? NAN : kInfinity)
                     : exponent == 0 ? std::ldexp(mantissa, -24)
                                     : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

class Array {
 public:
  Array() = default;
  Array(DType dtype, int64_t size) : dtype_(dtype), size_(size), bytes_(new char[size * size_of(dtype)]) {
    std::memset(bytes_.get(), 0xff, size * size_of(dtype));  // NaN: what is not written is seen
  }
  // Of numbers that the dtype holds exactly, but a float rounds them.
  Array(DType dtype, int64_t size, const std::function<double()>& draw) : Array(dtype, size) {
    for (int64_t i = 0; i < size; ++i) set(i, draw());
  }

  std::vector<double> values() const {
    std::vector<double> all(size_);
    for (int64_t i = 0; i < size_; ++i) all[i] = (*this)[i];
    return all;
  }
  void* data() const { return bytes_.get(); }
  int64_t size() const { return size_; }
  bool equals(const Array& other) const {
    return std::memcmp(bytes_.get(), other.bytes_.get(), size_ * size_of(dtype_)) == 0;
  }
  double operator[](int64_t i) const {
    const char* p = bytes_.get() + i * size_of(dtype_);
    if (dtype_ == DType::f64) return read<double>(p);
    if (dtype_ == DType::f32) return read<float>(p);
    if (dtype_ == DType::f16) return decode_half(read<uint16_t>(p));
    uint32_t bits = uint32_t{read<uint16_t>(p)} << 16;
    return read<float>(reinterpret_cast<const char*>(&bits));
  }
  void set(int64_t i, double value) {
    char* p = bytes_.get() + i * size_of(dtype_);
    if (dtype_ == DType::f64) {
      std::memcpy(p, &value, sizeof(value));
    } else if (dtype_ == DType::f32) {
      float x = static_cast<float>(value);
      std::memcpy(p, &x, sizeof(x));
    } else {
      // Eight bits or fewer of mantissa: the upper half of the float, or its exponent moved.
      float x = static_cast<float>(value);
      uint32_t bits = read<uint32_t>(reinterpret_cast<const char*>(&x));
      uint16_t half = static_cast<uint16_t>(bits >> 16);
      if (dtype_ == DType::f16) {
        uint32_t magnitude = bits & 0x7fffffff;
        uint32_t moved = magnitude == 0 ? 0 : magnitude >= 0x7f800000 ? 0x7c00 : (magnitude >> 13) - (112 << 10);
        half = static_cast<uint16_t>((bits >> 16 & 0x8000) | moved);
      }
      std::memcpy(p, &half, sizeof(half));
    }
  }

 private:
  template <typename T>
  static T read(const char* p) {
    T x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }

  DType dtype_ = DType::f32;
  int64_t size_ = 0;
  std::unique_ptr<char[]> bytes_;
};

// Problems

struct Case {
  DType dtype;
  Problem p{};
  Array q, k, v, dout, out, lse, dlse, dq, dk, dv, scratch;
  Array bias, slopes, sinks, scales, dbias, dslopes;
  std::vector<int> bounds, q_offset, q_lengths, kv_lengths, cu_q, cu_kv, q_segments, kv_segments, q_ranges, kv_ranges;
  std::unique_ptr<bool[]> mask;
  std::vector<unsigned> seeds;
  std::string text;
};

class Drawer {
 public:
  Drawer(uint64_t seed, int largest) : generator_(seed), largest_(largest) {}

  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator_); }
  bool chance(int percent) { return integer(1, 100) <= percent; }
  // Few bits of mantissa where the dtype has only such.
  double number() {
    double x = std::normal_distribution<double>(0, 1)(generator_);
    return whole_mantissa_ ? x : std::round(x * 16) / 16;
  }

  std::unique_ptr<Case> draw() {
    auto c = std::make_unique<Case>();
    c->dtype = static_cast<DType>(integer(0, 3));
    whole_mantissa_ = wide(c->dtype) == c->dtype;
    Problem& p = c->p;
    constexpr int kLengths[] = {1, 2, 5, 8, 9, 17, 33, 48, 49, 64, 97, 130, 200};
    constexpr int kDims[] = {1, 8, 16, 24, 32, 40, 59, 64, 72, 128, 136};
    auto one_of = [&](const auto& all) { return all[integer(0, static_cast<int>(std::size(all)) - 1)]; };
    p.batch = integer(1, 3);
    p.kv_heads = integer(1, 3);
    p.q_heads = p.kv_heads * integer(1, 4);
    p.q_length = std::min(largest_, one_of(kLengths));
    p.kv_length = std::min(largest_, chance(5) ? 1100 : one_of(kLengths));
    p.head_dim = one_of(kDims);
    p.value_head_dim = chance(60) ? p.head_dim : one_of(kDims);
    // Decoding without options has code of its own in the backward.
    bool plain = chance(15);
    if (plain) {
      p.q_length = integer(1, 5);
      p.head_dim = 16 * integer(1, 9);
      p.value_head_dim = chance(60) ? p.head_dim : 16 * integer(1, 9);
    }
    auto option = [&](int percent) { return !plain && chance(percent); };
    Options& o = p.options;
    o.sequences = 1;
    o.scale = 1 / std::sqrt(static_cast<double>(p.head_dim));
    o.causal = chance(40);
    if (chance(20)) {
      for (int i = 0; i < 2 * p.batch; ++i) c->bounds.push_back(chance(25) ? kAbsent : integer(-20, 40));
      o.has_window_bounds = true;
      p.window_bounds = c->bounds.data();
    } else {
      if (chance(25)) o.window_left = integer(0, 40);
      if (chance(25)) o.window_right = integer(0, 40);
    }
    if (option(20)) o.softcap = 3;
    if (option(20)) o.dropout_rate = 0.25;
    bool packed = option(20);
    auto lengths = [&](std::vector<int>& to, int all) {
      to.resize(p.batch);
      for (int& x : to) x = integer(0, all);
    };
    if (packed) {
      o.sequences = integer(1, 4);
      o.has_cu_q_lengths = o.has_cu_kv_lengths = true;
      auto starts = [&](std::vector<int>& to, int all) {
        for (int b = 0; b < p.batch; ++b) {
          std::vector<int> cuts(o.sequences + 1);
          for (int& x : cuts) x = integer(0, all);
          std::sort(cuts.begin(), cuts.end());
          cuts[0] = 0;
          to.insert(to.end(), cuts.begin(), cuts.end());
        }
      };
      starts(c->cu_q, p.q_length);
      starts(c->cu_kv, p.kv_length);
      p.cu_q_lengths = c->cu_q.data();
      p.cu_kv_lengths = c->cu_kv.data();
    } else {
      if (chance(20)) lengths(c->q_lengths, p.q_length), o.has_q_lengths = true, p.q_lengths = c->q_lengths.data();
      if (chance(20)) lengths(c->kv_lengths, p.kv_length), o.has_kv_lengths = true, p.kv_lengths = c->kv_lengths.data();
    }
    if (chance(40)) {
      c->q_offset.resize(int64_t{p.batch} * o.sequences);
      for (int& x : c->q_offset) x = integer(-p.q_length - 2, p.kv_length + 2);
      o.has_q_offset = true;
      p.q_offset = c->q_offset.data();
    }
    if (!packed && option(20)) {
      auto segments = [&](std::vector<int>& ids, std::vector<int>& ranges, int length) {
        ids.resize(int64_t{p.batch} * length);
        for (int b = 0; b < p.batch; ++b) {
          int id = 0;
          for (int i = 0; i < length; ++i) ids[b * length + i] = id += chance(5);
          for (int i = 0; i < length; i += kSegmentBlock) {
            auto begin = ids.begin() + b * length + i,
                 end = ids.begin() + b * length + std::min(length, i + kSegmentBlock);
            ranges.push_back(*std::min_element(begin, end));
            ranges.push_back(*std::max_element(begin, end));
          }
        }
      };
      segments(c->q_segments, c->q_ranges, p.q_length);
      segments(c->kv_segments, c->kv_ranges, p.kv_length);
      o.has_q_segment_ids = o.has_kv_segment_ids = o.has_q_segment_ranges = o.has_kv_segment_ranges = true;
      p.q_segment_ids = c->q_segments.data();
      p.kv_segment_ids = c->kv_segments.data();
      p.q_segment_ranges = c->q_ranges.data();
      p.kv_segment_ranges = c->kv_ranges.data();
    }
    auto strides = [&](int64_t& size) {
      int dims[4] = {p.batch, p.q_heads, p.q_length, p.kv_length};
      for (int& x : dims) x = chance(30) ? 1 : x;
      size = int64_t{dims[0]} * dims[1] * dims[2] * dims[3];
      long long row = dims[3], head = row * dims[2], batch = head * dims[1];
      return Strides{dims[0] > 1 ? batch : 0, dims[1] > 1 ? head : 0, dims[2] > 1 ? row : 0, dims[3] > 1 ? 1 : 0};
    };
    DType statistics = wide(c->dtype);
    auto number = [&] { return this->number(); };
    if (option(15)) {
      c->scales = Array(statistics, p.batch, [&] { return 0.0625 * integer(1, 8); });
      o.scale = 1;
      o.has_traced_scale = true;
      p.traced_scale = c->scales.data();
    }
    if (!packed && option(20)) {
      int64_t size;
      p.mask_strides = strides(size);
      c->mask.reset(new bool[size]);
      for (int64_t i = 0; i < size; ++i) c->mask[i] = chance(70);
      o.has_mask = true;
      p.mask = c->mask.get();
    }
    if (!packed && option(25)) {
      int64_t size;
      p.bias_strides = strides(size);
      o.wide_bias = statistics == c->dtype || chance(50);
      c->bias = Array(o.wide_bias ? statistics : c->dtype, size, [&] { return chance(10) ? -kInfinity : number(); });
      o.has_bias = true;
      p.bias = c->bias.data();
      if ((o.has_dbias = chance(60))) c->dbias = Array(statistics, size), p.dbias = c->dbias.data();
    }
    if (option(20)) {
      int64_t size = int64_t{p.batch} * o.sequences * p.q_heads;
      c->slopes = Array(statistics, size, [&] { return std::abs(number()) / 16; });
      o.has_alibi_slopes = true;
      p.alibi_slopes = c->slopes.data();
      if ((o.has_dalibi_slopes = chance(60))) {
        c->dslopes = Array(statistics, size);
        p.dalibi_slopes = c->dslopes.data();
      }
    }
    if (chance(20)) {
      c->sinks = Array(statistics, int64_t{p.batch} * p.q_heads, number);
      o.has_sinks = true;
      p.sinks = c->sinks.data();
    }
    if (o.dropout_rate > 0) {
      c->seeds.resize(int64_t{p.batch} * o.sequences * p.q_heads * 2);
      for (unsigned& x : c->seeds) x = static_cast<unsigned>(generator_());
      o.has_dropout_seeds = true;
      p.dropout_seeds = c->seeds.data();
    }
    auto tensor = [&](Array& x, int length, int heads, int dim, bool drawn) {
      int64_t size = int64_t{p.batch} * length * heads * dim;
      x = drawn ? Array(c->dtype, size, number) : Array(c->dtype, size);
      return Tensor{x.data(), static_cast<long long>(length) * heads * dim, static_cast<long long>(heads) * dim, dim};
    };
    p.q = tensor(c->q, p.q_length, p.q_heads, p.head_dim, true);
    p.k = tensor(c->k, p.kv_length, p.kv_heads, p.head_dim, true);
    p.v = tensor(c->v, p.kv_length, p.kv_heads, p.value_head_dim, true);
    p.dout = tensor(c->dout, p.q_length, p.q_heads, p.value_head_dim, true);
    p.out = tensor(c->out, p.q_length, p.q_heads, p.value_head_dim, false);
    p.dq = tensor(c->dq, p.q_length, p.q_heads, p.head_dim, false);
    p.dk = tensor(c->dk, p.kv_length, p.kv_heads, p.head_dim, false);
    p.dv = tensor(c->dv, p.kv_length, p.kv_heads, p.value_head_dim, false);
    int64_t rows = int64_t{p.batch} * p.q_heads * p.q_length;
    c->lse = Array(statistics, rows);
    c->dlse = Array(statistics, rows);
    p.lse = c->lse.data();
    p.dlse = c->dlse.data();
    c->scratch = Array(statistics, cpu::backward_scratch(c->dtype, p));
    p.scratch = c->scratch.data();
    constexpr const char* kNames[] = {"float16", "bfloat16", "float32", "float64"};
    char text[400];
    std::snprintf(text, sizeof(text),
                  "%s B=%d T=%d S=%d N=%d K=%d H=%d V=%d causal=%d window=(%d, %d) softcap=%g dropout=%g sequences=%d "
                  "offset=%d lengths=(%d, %d) segments=%d mask=%d bias=%d slopes=%d sinks=%d scales=%d bounds=%d",
                  kNames[static_cast<int>(c->dtype)], p.batch, p.q_length, p.kv_length, p.q_heads, p.kv_heads,
                  p.head_dim, p.value_head_dim, o.causal, o.window_left, o.window_right, o.softcap, o.dropout_rate,
                  packed ? o.sequences : 0, o.has_q_offset, o.has_q_lengths, o.has_kv_lengths, o.has_q_segment_ids,
                  o.has_mask, o.has_bias + o.has_dbias, o.has_alibi_slopes + o.has_dalibi_slopes, o.has_sinks,
                  o.has_traced_scale, o.has_window_bounds);
    c->text = text;
    return c;
  }

 private:
  std::mt19937_64 generator_;
  int largest_;
  bool whole_mantissa_ = false;
};

// The plain computation

bool dropped(const Problem& p, const unsigned* seed, int64_t t, int64_t s) {
  uint32_t c[4] = {static_cast<uint32_t>(t / 16 * 8 + t % 8), static_cast<uint32_t>(s / 32 * 8 + s % 8), 0, 0};
  uint32_t key[2] = {seed[0], seed[1]};
  for (int round = 0; round < 7; ++round) {
    uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b),
                        static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(a)};
    std::memcpy(c, next, sizeof(c));
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  uint32_t bits = c[s % 32 / 8] >> (t % 16 < 8 ? 0 : 16) & 0xffff;
  return bits < std::floor(65536 * p.options.dropout_rate + 0.5);
}

struct Right {
  std::vector<double> out, lse, delta, dq, dk, dv, dbias, dslopes;
  // Sums of the magnitudes of the terms of dq, dk, dbias and dslopes, most of which may cancel.
  std::vector<double> dq_sizes, dk_sizes, dbias_sizes, dslopes_sizes;
  // Of each row with slopes: which gradient it adds to, and what times dlse it subtracts from it.
  std::vector<int64_t> slope_of_row;
  std::vector<double> distances;
};

Right compute(const Case& c) {
  const Problem& p = c.p;
  const Options& o = p.options;
  Right r;
  r.out.resize(c.out.size());
  r.dq.resize(c.dq.size());
  r.dk.resize(c.dk.size());
  r.dq_sizes.resize(c.dq.size());
  r.dk_sizes.resize(c.dk.size());
  r.dv.resize(c.dv.size());
  r.lse.resize(c.lse.size());
  r.delta.resize(c.dlse.size());
  r.dbias.resize(c.dbias.size());
  r.dslopes.resize(c.dslopes.size());
  r.dbias_sizes.resize(c.dbias.size());
  r.dslopes_sizes.resize(c.dslopes.size());
  r.slope_of_row.resize(c.dlse.size());
  r.distances.resize(c.dlse.size());
  const std::vector<double> all_q = c.q.values(), all_k = c.k.values(), all_v = c.v.values(),
                            all_dout = c.dout.values();
  const std::vector<double> all_bias = c.bias.values();
  double threshold = std::floor(65536 * o.dropout_rate + 0.5), keep_factor = 65536 / (65536 - threshold);
  int group = p.q_heads / p.kv_heads;
  std::vector<double> score(p.kv_length), derivative(p.kv_length);
  for (int64_t b = 0; b < p.batch; ++b) {
    double scale = p.traced_scale ? c.scales[b] : o.scale;
    int64_t left = p.window_bounds ? p.window_bounds[2 * b] : o.window_left;
    int64_t right = p.window_bounds ? p.window_bounds[2 * b + 1] : o.window_right;
    for (int64_t t = 0; t < p.q_length; ++t) {
      // The row's sequence: [row, ...) and the keys [first, last).
      int64_t sequence = 0, row = 0, first = 0, last = p.kv_length;
      bool padding = false;
      if (p.cu_q_lengths) {
        const int* q = p.cu_q_lengths + b * (o.sequences + 1);
        const int* k = p.cu_kv_lengths + b * (o.sequences + 1);
        while (sequence < o.sequences && t >= q[sequence + 1]) ++sequence;
        padding = sequence == o.sequences;
        if (!padding) row = q[sequence], first = k[sequence], last = k[sequence + 1];
      }
      if (p.q_lengths) padding |= t >= p.q_lengths[b];
      if (p.kv_lengths) last = p.kv_lengths[b];
      int64_t position = t - row + (p.q_offset && !padding ? p.q_offset[b * o.sequences + sequence] : 0);
      for (int64_t n = 0; n < p.q_heads; ++n) {
        int64_t statistic = (b * p.q_heads + n) * p.q_length + t, head = (b * o.sequences + sequence) * p.q_heads + n;
        double sink = p.sinks ? c.sinks[b * p.q_heads + n] : -kInfinity, highest = padding ? -kInfinity : sink;
        if (padding) {
          r.lse[statistic] = sink;
          continue;
        }
        auto at = [&](int64_t length, int64_t i, int64_t heads, int64_t h, int64_t dim) {
          return ((b * length + i) * heads + h) * dim;
        };
        int64_t q = at(p.q_length, t, p.q_heads, n, p.head_dim),
                out = at(p.q_length, t, p.q_heads, n, p.value_head_dim);
        auto k = [&](int64_t s) { return at(p.kv_length, s, p.kv_heads, n / group, p.head_dim); };
        auto v = [&](int64_t s) { return at(p.kv_length, s, p.kv_heads, n / group, p.value_head_dim); };
        auto bias = [&](int64_t s) {
          const Strides& x = p.bias_strides;
          return b * x.batch + n * x.head + t * x.row + s * x.column;
        };
        for (int64_t s = first; s < last; ++s) {
          int64_t key = s - first;
          bool kept = !(o.causal && key > position) && !(left != kAbsent && key < position - left) &&
                      !(right != kAbsent && key > position + right);
          if (p.q_segment_ids) kept &= p.q_segment_ids[b * p.q_length + t] == p.kv_segment_ids[b * p.kv_length + s];
          const Strides& m = p.mask_strides;
          if (p.mask) kept &= p.mask[b * m.batch + n * m.head + t * m.row + s * m.column];
          double x = 0;
          for (int h = 0; h < p.head_dim; ++h) x += all_q[q + h] * all_k[k(s) + h];
          x *= scale;
          derivative[s] = 1;
          if (o.softcap != 0) {
            double tanh = std::tanh(x / o.softcap);
            derivative[s] = 1 - tanh * tanh;
            x = o.softcap * tanh;
          }
          if (p.bias) x += all_bias[bias(s)];
          if (p.alibi_slopes) x -= c.slopes[head] * std::abs(static_cast<double>(position - key));
          score[s] = kept ? x : -kInfinity;
          highest = std::max(highest, score[s]);
        }
        double total = highest == -kInfinity ? 0 : std::exp(sink - highest);
        for (int64_t s = first; s < last; ++s) total += highest == -kInfinity ? 0 : std::exp(score[s] - highest);
        r.lse[statistic] = total == 0 ? -kInfinity : highest + std::log(total);
        if (total == 0) continue;
        auto weight = [&](int64_t s) { return std::exp(score[s] - highest) / total; };
        const unsigned* seed = p.dropout_seeds ? p.dropout_seeds + head * 2 : nullptr;
        auto factor = [&](int64_t s) { return !seed ? 1 : dropped(p, seed, t - row, s - first) ? 0 : keep_factor; };
        for (int64_t s = first; s < last; ++s) {
          double used = weight(s) * factor(s);
          for (int h = 0; h < p.value_head_dim && used != 0; ++h) r.out[out + h] += used * all_v[v(s) + h];
        }
        double delta = 0;
        for (int h = 0; h < p.value_head_dim; ++h) delta += all_dout[out + h] * r.out[out + h];
        r.delta[statistic] = delta;
        for (int64_t s = first; s < last; ++s) {
          double w = weight(s), used = w * factor(s), dweight = 0;
          if (w == 0) continue;
          for (int h = 0; h < p.value_head_dim; ++h) {
            r.dv[v(s) + h] += used * all_dout[out + h];
            dweight += all_dout[out + h] * all_v[v(s) + h];
          }
          double dscore = w * (dweight * factor(s) - delta);
          double size = w * (std::abs(dweight * factor(s)) + std::abs(delta));
          if (p.dbias) {
            r.dbias[bias(s)] += dscore;
            r.dbias_sizes[bias(s)] += size;
          }
          if (p.dalibi_slopes) {
            double distance = std::abs(static_cast<double>(position - (s - first)));
            r.dslopes[head] -= dscore * distance;
            r.dslopes_sizes[head] += size * distance;
            r.slope_of_row[statistic] = head;
            r.distances[statistic] += w * distance;
          }
          for (int h = 0; h < p.head_dim; ++h) {
            r.dq[q + h] += dscore * derivative[s] * scale * all_k[k(s) + h];
            r.dq_sizes[q + h] += size * derivative[s] * scale * std::abs(all_k[k(s) + h]);
            r.dk[k(s) + h] += dscore * derivative[s] * scale * all_q[q + h];
            r.dk_sizes[k(s) + h] += size * derivative[s] * scale * std::abs(all_q[q + h]);
          }
        }
      }
    }
  }
  return r;
}

// Comparisons

// `tolerance` is relative to the largest value, which is taken for `least` when it is smaller: sums may cancel.
bool close(const Case& c, const char* name, const Array& got, const std::vector<double>& want, double tolerance,
           double least = 0.1) {
  double largest = least, error = 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    if (std::isfinite(want[i])) largest = std::max(largest, std::abs(want[i]));
  }
  for (int64_t i = 0; i < got.size(); ++i) {
    double difference = got[i] == want[i] ? 0 : std::abs(got[i] - want[i]);
    if (!(difference <= error)) error = difference;
  }
  if (error <= tolerance * largest) return true;
  std::printf("%s is wrong by %g, largest value %g: %s\n", name, error, largest, c.text.c_str());
  return false;
}

double largest(const std::vector<double>& sizes) {
  return sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
}

// Makes delta that of the plain computation, since gradients of the forward's own output would include its rounding.
// The gradients of slopes are not computed from delta, so dlse adds to them.
void set_dlse(Case& c, Right& right) {
  const Problem& p = c.p;
  for (int64_t row = 0; row < c.dlse.size(); ++row) {
    int64_t t = row % p.q_length, head = row / p.q_length % p.q_heads, batch = row / p.q_length / p.q_heads;
    int64_t at = batch * p.out.batch_stride + t * p.out.row_stride + head * p.out.head_stride;
    double sum = 0;
    for (int h = 0; h < p.value_head_dim; ++h) sum += c.dout[at + h] * c.out[at + h];
    c.dlse.set(row, sum - right.delta[row]);
    if (c.dslopes.size()) right.dslopes[right.slope_of_row[row]] -= c.dlse[row] * right.distances[row];
  }
}

bool check(Case& c, Drawer& drawer) {
  Right right = compute(c);
  cpu::ParallelFor one = run_on(1);
  cpu::forward(c.dtype, c.p, 1, one);
  set_dlse(c, right);
  cpu::backward(c.dtype, c.p, 1, one);
  double eps = epsilon(c.dtype), wide_eps = epsilon(wide(c.dtype)), gradient = 4 * eps + 160 * wide_eps;
  // With one key only the rounding of the terms of dq and dk is left, which is proportional to their magnitudes.
  double least_of_dq = std::max(1.0, largest(right.dq_sizes) / 20);
  double least_of_dk = std::max(1.0, largest(right.dk_sizes) / 20);
  bool ok = close(c, "lse", c.lse, right.lse, 20 * wide_eps) &&
            close(c, "out", c.out, right.out, 2 * eps + 40 * wide_eps) &&
            close(c, "dq", c.dq, right.dq, gradient, least_of_dq) &&
            close(c, "dk", c.dk, right.dk, gradient, least_of_dk) && close(c, "dv", c.dv, right.dv, gradient) &&
            close(c, "dbias", c.dbias, right.dbias, 20 * wide_eps, largest(right.dbias_sizes)) &&
            close(c, "dalibi_slopes", c.dslopes, right.dslopes, 20 * wide_eps, largest(right.dslopes_sizes));
  if (!ok) return false;

  struct Result {
    const char* name;
    Array* array;
    void** pointer;
  };
  Result results[] = {{"out", &c.out, &c.p.out.data},
                      {"lse", &c.lse, &c.p.lse},
                      {"dq", &c.dq, &c.p.dq.data},
                      {"dk", &c.dk, &c.p.dk.data},
                      {"dv", &c.dv, &c.p.dv.data},
                      {"dbias", &c.dbias, &c.p.dbias},
                      {"dalibi_slopes", &c.dslopes, &c.p.dalibi_slopes}};
  std::vector<Array> again;
  for (Result& result : results) {
    DType dtype =
        &c.lse == result.array || &c.dbias == result.array || &c.dslopes == result.array ? wide(c.dtype) : c.dtype;
    again.emplace_back(dtype, result.array->size());
    if (result.array->size()) *result.pointer = again.back().data();
  }
  int threads = drawer.integer(2, 5);
  cpu::ParallelFor several = run_on(threads);
  cpu::forward(c.dtype, c.p, threads, several);
  cpu::backward(c.dtype, c.p, threads, several);
  for (size_t i = 0; i < again.size(); ++i) {
    if (results[i].array->equals(again[i])) continue;
    std::printf("%s depends on the number of threads: %s\n", results[i].name, c.text.c_str());
    return false;
  }
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  double seconds = count > 1 ? std::atof(arguments[1]) : 10;
  uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
  int largest = count > 3 ? std::atoi(arguments[3]) : 1100;
  auto begin = std::chrono::steady_clock::now();
  int64_t cases = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
    Drawer drawer(seed + cases, largest);
    if (!check(*drawer.draw(), drawer)) {
      std::printf("seed %llu\n", static_cast<unsigned long long>(seed + cases));
      return 1;
    }
    ++cases;
  }
  std::printf("%s: %lld cases\n", jax_flash::cpu::isa().c_str(), static_cast<long long>(cases));
}
