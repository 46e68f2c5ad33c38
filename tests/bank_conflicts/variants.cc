// Writes the sources of the kernels whose accesses to shared memory are counted, as the runtime hands them to NVRTC:
// every family, pass and tile row, for arrays of one and of two limbs.
//   variants FOLDER  -> one file each, ready for the host's compiler
#include <algorithm>
#include <fstream>
#include <iostream>
#include <set>
#include <string>

#include "cuda/host/jit.h"

using namespace jax_flash;
using namespace jax_flash::cuda;

namespace {

bool served(const Variant& variant, int limbs) {
  try {
    tile_row(variant.family, limbs, variant.pass, variant.head_dim, variant.arch, Calls::plain);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

}  // namespace

int main(int, char** arguments) {
  const std::string folder = arguments[1];
  std::set<std::string> seen;
  for (int arch : {70, 75, 80, 86, 90}) {
    const std::string family = arch >= 80 ? "sm80" : arch == 75 ? "sm75" : "sm70";
    for (int limbs : {1, 2}) {
      for (Pass pass : {Pass::forward, Pass::backward, Pass::backward_dq, Pass::backward_bias}) {
        for (int head_dim : {16, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256}) {
          Options options{};
          options.highest_precision = options.has_descale = limbs == 2;
          options.separate_dq =
              pass == Pass::backward_dq || (pass == Pass::backward && (family == "sm70" || limbs == 2));
          options.has_bias = options.has_dbias = pass == Pass::backward_bias;
          Variant variant{family, arch, pass, DType::f16, head_dim, head_dim, options, {}};
          if (!served(variant, limbs)) continue;
          variant.tile = tile_row(family, limbs, pass, head_dim, arch, Calls::plain);  // without options
          const std::string source = variant.source();
          if (!seen.insert(source).second) continue;  // another compute capability takes the same tile row
          const std::string index = std::to_string(seen.size()), name = variant.name();
          const std::string entry = entry_point(pass);
          std::ofstream file(folder + "/" + name + ".cc");
          // All of them are linked together, so each has its own names.
          file << "#define jax_flash jax_flash_" << index << "\n";
          for (std::string suffix : {"", "_traits"}) {
            file << "#define " << entry << suffix << " " << entry << suffix << "_" << index << "\n";
          }
          for (std::string helper :
               {"convert_dq", "sum_slopes", "sum_splits", "float32_forward", "float32_backward", "float32_bias"}) {
            file << "#define jax_flash_" << helper << " jax_flash_" << helper << "_" << index << "\n";
          }
          file << source << "#include \"run.h\"\nRECORD_KERNEL(\"" << name << "\", " << entry << ")\n";
        }
      }
    }
  }
}
