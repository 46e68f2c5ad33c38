// Prints which instruction sets csrc/cpu/choice.h chooses, for bfloat16 and for other dtypes ("-" where it finds none):
//
//   choice VENDOR FAMILY MODEL SETS [WANTED]    for a processor that may use SETS, separated by commas, best first
//   choice                                      prints VENDOR FAMILY MODEL of this processor instead
#include "../../csrc/cpu/choice.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

using namespace jax_flash::cpu;

int main(int count, char** arguments) {
  if (count == 1) {
    Processor here = this_processor();
    std::printf("%s %d %d\n", here.vendor.c_str(), here.family, here.model);
    return 0;
  }
  if (count < 5) return 1;
  std::vector<std::string> names;
  std::istringstream list(arguments[4]);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  Choice choice = choose({arguments[1], std::atoi(arguments[2]), std::atoi(arguments[3])}, {names.begin(), names.end()},
                         count > 5 ? arguments[5] : "");
  auto text = [](std::string_view name) { return name.empty() ? std::string("-") : std::string(name); };
  std::printf("%s %s\n", text(choice.bf16).c_str(), text(choice.others).c_str());
}
