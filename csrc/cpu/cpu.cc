#include "cpu.h"
#include <cmath>
#include <cstring>
#include <vector>
namespace jax_flash::cpu {
int64_t backward_scratch(DType, const Problem&) { return 0; }
std::string isa() { return "baseline"; }
namespace {
double load(DType d, const void* p, int64_t i) {
  switch (d) {
    case DType::f64: return ((const double*)p)[i];
    case DType::f32: return ((const float*)p)[i];
    case DType::bf16: { uint32_t u = (uint32_t)((const uint16_t*)p)[i] << 16; float f; memcpy(&f, &u, 4); return f; }
    default: { _Float16 h; memcpy(&h, (const uint16_t*)p + i, 2); return (float)h; }
  }
}
void store(DType d, void* p, int64_t i, double v) {
  switch (d) {
    case DType::f64: ((double*)p)[i] = v; return;
    case DType::f32: ((float*)p)[i] = v; return;
    case DType::bf16: { float f = v; uint32_t u; memcpy(&u, &f, 4); u += 0x7fff + ((u >> 16) & 1); ((uint16_t*)p)[i] = u >> 16; return; }
    default: { _Float16 h = (_Float16)v; memcpy((uint16_t*)p + i, &h, 2); }
  }
}
int64_t at(const Tensor& t, int b, int r, int h) { return b * t.batch_stride + r * t.row_stride + h * t.head_stride; }
void stat(DType d, void* p, int64_t i, double v) { if (d == DType::f64) ((double*)p)[i] = v; else ((float*)p)[i] = v; }
double stat(DType d, const void* p, int64_t i) { return d == DType::f64 ? ((const double*)p)[i] : ((const float*)p)[i]; }
}
void forward(DType d, const Problem& p, const ParallelFor& pf) {
  pf((int64_t)p.batch * p.q_heads, [&](int64_t item) {
    int b = item / p.q_heads, n = item % p.q_heads, kh = n / (p.q_heads / p.kv_heads), H = p.head_dim;
    int64_t off = p.q_offset ? p.q_offset[b] : 0;
    std::vector<double> s(p.kv_length), o(H);
    for (int t = 0; t < p.q_length; ++t) {
      double m = -INFINITY, l = 0;
      for (int j = 0; j < p.kv_length; ++j) {
        double x = 0;
        for (int h = 0; h < H; ++h) x += load(d, p.q.data, at(p.q, b, t, n) + h) * load(d, p.k.data, at(p.k, b, j, kh) + h);
        s[j] = p.options.causal && j > t + off ? -INFINITY : x * p.options.scale;
        m = std::max(m, s[j]);
      }
      std::fill(o.begin(), o.end(), 0.0);
      if (m > -INFINITY) for (int j = 0; j < p.kv_length; ++j) {
        double e = std::exp(s[j] - m); l += e;
        for (int h = 0; h < H; ++h) o[h] += e * load(d, p.v.data, at(p.v, b, j, kh) + h);
      }
      for (int h = 0; h < H; ++h) store(d, p.out.data, at(p.out, b, t, n) + h, l > 0 ? o[h] / l : 0);
      stat(d, p.lse, item * p.q_length + t, l > 0 ? m + std::log(l) : -INFINITY);
    }
  });
}
void backward(DType d, const Problem& p, const ParallelFor& pf) {
  pf((int64_t)p.batch * p.kv_heads, [&](int64_t item) {
    int b = item / p.kv_heads, kh = item % p.kv_heads, H = p.head_dim, G = p.q_heads / p.kv_heads;
    int64_t off = p.q_offset ? p.q_offset[b] : 0;
    std::vector<double> dk((int64_t)p.kv_length * H), dv((int64_t)p.kv_length * H), dq(H);
    for (int n = kh * G; n < kh * G + G; ++n) for (int t = 0; t < p.q_length; ++t) {
      int64_t st = ((int64_t)b * p.q_heads + n) * p.q_length + t;
      double lse = stat(d, p.lse, st), delta = stat(d, p.delta, st);
      std::fill(dq.begin(), dq.end(), 0.0);
      if (lse > -INFINITY) for (int j = 0; j < p.kv_length; ++j) {
        if (p.options.causal && j > t + off) continue;
        double x = 0, dp = 0;
        for (int h = 0; h < H; ++h) {
          x += load(d, p.q.data, at(p.q, b, t, n) + h) * load(d, p.k.data, at(p.k, b, j, kh) + h);
          dp += load(d, p.dout.data, at(p.dout, b, t, n) + h) * load(d, p.v.data, at(p.v, b, j, kh) + h);
        }
        double pr = std::exp(x * p.options.scale - lse), ds = pr * (dp - delta) * p.options.scale;
        for (int h = 0; h < H; ++h) {
          dv[(int64_t)j * H + h] += pr * load(d, p.dout.data, at(p.dout, b, t, n) + h);
          dk[(int64_t)j * H + h] += ds * load(d, p.q.data, at(p.q, b, t, n) + h);
          dq[h] += ds * load(d, p.k.data, at(p.k, b, j, kh) + h);
        }
      }
      for (int h = 0; h < H; ++h) store(d, p.dq.data, at(p.dq, b, t, n) + h, dq[h]);
    }
    for (int j = 0; j < p.kv_length; ++j) for (int h = 0; h < H; ++h) {
      store(d, p.dk.data, at(p.dk, b, j, kh) + h, dk[(int64_t)j * H + h]);
      store(d, p.dv.data, at(p.dv, b, j, kh) + h, dv[(int64_t)j * H + h]);
    }
  });
}
}  // namespace
