#include "cuda.h"
#include <stdexcept>
namespace jax_flash::cuda {
void configure(Settings) {}
void prepare(int, Pass, DType, const Problem&) { throw std::runtime_error("no"); }
void launch(int, Stream, Pass, DType, const Problem&) {}
int64_t backward_scratch(const Problem&) { return 0; }
Status status() { return {}; }
std::vector<Kernel> build_common(int, const std::string&) { return {}; }
}
