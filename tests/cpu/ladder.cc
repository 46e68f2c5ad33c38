// Times one step of the CPU ladder in docs/ledger/cpu.md: tests/cpu/bench.py --tables ladder runs them all.
//
//   ladder STEP DTYPE B T S N K H CAUSAL THREADS [SECONDS]   prints GFLOP/s, the best of the rounds of SECONDS (1)
//
// STEP is `forward` or `backward`, the kernels of this build on so many threads, or a plain program that they replace:
//   naive    a row at a time: its scores in memory, then its weights, then their products with V
//   tiled    64 rows against 256 keys at a time with the online softmax, so that K and V are read once for 64 rows
// Both are float32 on one thread, for as many query as key heads, in plain loops for the compiler to vectorise.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/cpu/cpu.h"
#include "threads.h"

namespace {

using namespace jax_flash;

struct Shape {
  int batch, q_length, kv_length, q_heads, kv_heads, head_dim;
  bool causal;

  // By the convention of docs/performance.md.
  double flops() const {
    return 4.0 * batch * q_heads * q_length * static_cast<double>(kv_length) * head_dim * (causal ? 0.5 : 1);
  }
};

int keys_of(const Shape& shape, int t) { return shape.causal ? std::min(t + 1, shape.kv_length) : shape.kv_length; }

const float* row_of(const Tensor& x, int b, int t, int n) {
  return static_cast<const float*>(x.data) + b * x.batch_stride + t * x.row_stride + n * x.head_stride;
}

void naive(const Shape& shape, const Problem& p) {
  std::vector<float> weights(shape.kv_length);
  int dim = shape.head_dim;
  float scale = static_cast<float>(p.options.scale);
  for (int b = 0; b < shape.batch; ++b) {
    for (int n = 0; n < shape.q_heads; ++n) {
      for (int t = 0; t < shape.q_length; ++t) {
        const float* q = row_of(p.q, b, t, n);
        float* out = const_cast<float*>(row_of(p.out, b, t, n));
        int keys = keys_of(shape, t);
        float highest = -std::numeric_limits<float>::infinity(), total = 0;
        for (int s = 0; s < keys; ++s) {
          const float* k = row_of(p.k, b, s, n);
          float score = 0;
          for (int h = 0; h < dim; ++h) score += q[h] * k[h];
          weights[s] = score * scale;
          highest = std::max(highest, weights[s]);
        }
        for (int s = 0; s < keys; ++s) total += weights[s] = std::exp(weights[s] - highest);
        for (int h = 0; h < dim; ++h) out[h] = 0;
        for (int s = 0; s < keys; ++s) {
          const float* v = row_of(p.v, b, s, n);
          float weight = weights[s] / total;
          for (int h = 0; h < dim; ++h) out[h] += weight * v[h];
        }
      }
    }
  }
}

void tiled(const Shape& shape, const Problem& p) {
  constexpr int kRows = 64, kKeys = 256;
  int dim = shape.head_dim;
  float scale = static_cast<float>(p.options.scale);
  std::vector<float> sums(kRows * dim), highest(kRows), total(kRows), weights(kKeys);
  for (int b = 0; b < shape.batch; ++b) {
    for (int n = 0; n < shape.q_heads; ++n) {
      for (int first = 0; first < shape.q_length; first += kRows) {
        int rows = std::min(kRows, shape.q_length - first);
        std::fill(sums.begin(), sums.end(), 0.0f);
        std::fill(highest.begin(), highest.end(), -std::numeric_limits<float>::infinity());
        std::fill(total.begin(), total.end(), 0.0f);
        for (int begin = 0; begin < keys_of(shape, first + rows - 1); begin += kKeys) {
          for (int i = 0; i < rows; ++i) {
            int keys = std::min(begin + kKeys, keys_of(shape, first + i)) - begin;
            if (keys <= 0) continue;
            const float* q = row_of(p.q, b, first + i, n);
            float* out = sums.data() + i * dim;
            float before = highest[i];
            for (int j = 0; j < keys; ++j) {
              const float* k = row_of(p.k, b, begin + j, n);
              float score = 0;
              for (int h = 0; h < dim; ++h) score += q[h] * k[h];
              weights[j] = score * scale;
              highest[i] = std::max(highest[i], weights[j]);
            }
            float decay = std::exp(before - highest[i]);
            total[i] *= decay;
            for (int h = 0; h < dim; ++h) out[h] *= decay;
            for (int j = 0; j < keys; ++j) {
              float weight = std::exp(weights[j] - highest[i]);
              total[i] += weight;
              const float* v = row_of(p.v, b, begin + j, n);
              for (int h = 0; h < dim; ++h) out[h] += weight * v[h];
            }
          }
        }
        for (int i = 0; i < rows; ++i) {
          float* out = const_cast<float*>(row_of(p.out, b, first + i, n));
          for (int h = 0; h < dim; ++h) out[h] = sums[i * dim + h] / total[i];
        }
      }
    }
  }
}

// Memory aligned as XLA's, of numbers from a normal distribution as the dtype has them.
struct Free {
  void operator()(char* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Buffer = std::unique_ptr<char[], Free>;

Buffer draw(DType dtype, int64_t size, std::mt19937& generator) {
  int64_t element = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
  Buffer buffer(static_cast<char*>(::operator new[](std::max<int64_t>(size, 1) * element, std::align_val_t{64})));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < size; ++i) {
    float x = normal(generator);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    // What the cut leaves of a float is a bfloat16. Of a float16 it has the sign, and an exponent between -6 and 1.
    uint16_t upper = static_cast<uint16_t>(bits >> 16);
    if (dtype == DType::f16) upper = static_cast<uint16_t>((upper & 0x8000) | 0x2400 | (upper & 0x1fff));
    double wide = x;
    const void* from = dtype == DType::f64 ? static_cast<const void*>(&wide) : dtype == DType::f32 ? &x : nullptr;
    std::memcpy(buffer.get() + i * element, from ? from : &upper, element);
  }
  return buffer;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 11) {
    std::fprintf(stderr, "usage: ladder STEP DTYPE B T S N K H CAUSAL THREADS [SECONDS]\n");
    return 2;
  }
  std::string step = argv[1], name = argv[2];
  auto number = [&](int i) { return std::atoi(argv[i]); };
  Shape shape{number(3), number(4), number(5), number(6), number(7), number(8), number(9) != 0};
  int threads = number(10);
  double seconds = argc > 11 ? std::atof(argv[11]) : 1;
  DType dtype = name == "float64"    ? DType::f64
                : name == "float32"  ? DType::f32
                : name == "bfloat16" ? DType::bf16
                                     : DType::f16;
  std::mt19937 generator(0);
  std::vector<Buffer> buffers;
  auto array = [&](DType dtype, int64_t size) {
    buffers.push_back(draw(dtype, size, generator));
    return buffers.back().get();
  };
  auto tensor = [&](int length, int heads) {
    long long row = static_cast<long long>(heads) * shape.head_dim, batch = row * length;
    return Tensor{array(dtype, batch * shape.batch), batch, row, shape.head_dim};
  };
  Problem p{};
  p.options.sequences = 1;
  p.options.scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
  p.options.causal = shape.causal;
  p.batch = shape.batch;
  p.q_length = shape.q_length;
  p.kv_length = shape.kv_length;
  p.q_heads = shape.q_heads;
  p.kv_heads = shape.kv_heads;
  p.head_dim = p.value_head_dim = shape.head_dim;
  p.q = tensor(shape.q_length, shape.q_heads);
  p.k = tensor(shape.kv_length, shape.kv_heads);
  p.v = tensor(shape.kv_length, shape.kv_heads);
  p.out = tensor(shape.q_length, shape.q_heads);
  p.dout = tensor(shape.q_length, shape.q_heads);
  p.dq = tensor(shape.q_length, shape.q_heads);
  p.dk = tensor(shape.kv_length, shape.kv_heads);
  p.dv = tensor(shape.kv_length, shape.kv_heads);
  DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
  int64_t rows = int64_t{shape.batch} * shape.q_heads * shape.q_length;
  p.lse = array(wide, rows);
  p.dlse = array(wide, rows);
  p.scratch = array(wide, cpu::backward_scratch(dtype, p));
  cpu::ParallelFor parallel_for = run_on(threads);
  std::function<void()> run;
  double flops = shape.flops();
  if (step == "naive") {
    run = [&] { naive(shape, p); };
  } else if (step == "tiled") {
    run = [&] { tiled(shape, p); };
  } else if (step == "forward") {
    run = [&] { cpu::forward(dtype, p, threads, parallel_for); };
  } else if (step == "backward") {
    cpu::forward(dtype, p, threads, parallel_for);
    flops *= 2.5;
    run = [&] { cpu::backward(dtype, p, threads, parallel_for); };
  } else {
    std::fprintf(stderr, "STEP must be naive, tiled, forward or backward, got %s\n", step.c_str());
    return 2;
  }
  // One thread's time is the processor's: other work on the machine counts less.
  auto now = [&] {
    timespec time;
    clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  run();
  double best = std::numeric_limits<double>::infinity(), begin = now();
  for (double time = begin; time < begin + seconds;) {
    run();
    double end = now();
    best = std::min(best, end - time);
    time = end;
  }
  std::printf("%s %.2f GFLOP/s, %.2f us\n", cpu::isa().c_str(), flops / best / 1e9, best * 1e6);
}
