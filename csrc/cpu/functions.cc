#include "functions.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

namespace jax_flash::cpu {
namespace {

struct Named {
  Operation operation;
  int arguments;
};

const std::map<std::string, Named>& operations() {
  static const std::map<std::string, Named> all = {
#define JAX_FLASH_INPUT(name) {#name, {Operation::name, 0}},
      JAX_FLASH_INPUT(score) JAX_FLASH_INPUT(b) JAX_FLASH_INPUT(h) JAX_FLASH_INPUT(q) JAX_FLASH_INPUT(kv)
#undef JAX_FLASH_INPUT
          {"constant", {Operation::constant, 0}},
#define JAX_FLASH_UNARY(name, ...) {#name, {Operation::name##_, 1}},
#define JAX_FLASH_BINARY(name, ...) {#name, {Operation::name##_, 2}},
#define JAX_FLASH_TERNARY(name, ...) {#name, {Operation::name##_, 3}},
      JAX_FLASH_CPU_LIBRARY(JAX_FLASH_UNARY) JAX_FLASH_CPU_OPERATIONS(
          JAX_FLASH_UNARY, JAX_FLASH_BINARY, JAX_FLASH_TERNARY) JAX_FLASH_CPU_LOADS(JAX_FLASH_UNARY)
#undef JAX_FLASH_TERNARY
#undef JAX_FLASH_BINARY
#undef JAX_FLASH_UNARY
  };
  return all;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::invalid_argument("the functions of a call are malformed: " + what);
}

// A line of a text: an operation of earlier ones.
struct Line {
  Operation operation;
  int arguments = 0;
  int args[3]{};
  int number = 0;
  int64_t of_call = 0;
};
struct LinesOfAddition {
  int gradient;
  int64_t of_call;
  int derivative, index, valid;  // valid: -1 for always
};
struct Lines {
  std::vector<Line> lines;
  std::vector<int> results;
  std::vector<LinesOfAddition> additions;
};

// What a value depends on.
constexpr int kRows = 1, kKeys = 2, kScore = 4;
int own_dependency(Operation operation) {
  switch (operation) {
    // Rows of several heads may share a tile.
    case Operation::h:
    case Operation::q: return kRows;
    case Operation::kv: return kKeys;
    case Operation::score: return kScore;
    default: return 0;
  }
}

// Gives each step of one side a slot, that of a value that no later step reads if there is one.
class Slots {
 public:
  int take() {
    if (free_.empty()) return count_++;
    const int slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give(int slot) { free_.push_back(slot); }
  int count() const { return count_; }

 private:
  std::vector<int> free_;
  int count_ = 0;
};

Steps planned(Lines text, int of_lanes) {
  const int of_lines = of_lanes == kRows ? kKeys : kRows;
  std::vector<Side> sides;
  std::vector<int> depends;
  auto side_of = [&](int dependencies) {
    return (dependencies & ~of_lanes) == 0 ? Side::lane : dependencies == of_lines ? Side::line : Side::pair;
  };
  for (const Line& line : text.lines) {
    int all = own_dependency(line.operation);
    for (int i = 0; i < line.arguments; ++i) all |= depends[line.args[i]];
    depends.push_back(all);
    sides.push_back(side_of(all));
  }
  // Steps of pairs read lines by way of all lanes, and results are of pairs. These steps come right before their first
  // reader, so that their slots are soon free again.
  std::vector<Line> lines;
  std::vector<Side> new_sides;
  std::vector<int> moved(text.lines.size(), -1), spread(text.lines.size(), -1);
  auto put = [&](const Line& line, Side side) {
    lines.push_back(line);
    new_sides.push_back(side);
    return static_cast<int>(lines.size()) - 1;
  };
  auto for_pairs = [&](int i, bool result) {
    if (sides[i] == Side::pair || (sides[i] == Side::lane && !result)) return moved[i];
    if (spread[i] < 0) {
      const Operation operation = sides[i] == Side::line ? Operation::spread : Operation::copy_;
      spread[i] = put({operation, 1, {moved[i]}}, Side::pair);
    }
    return spread[i];
  };
  for (size_t i = 0; i < text.lines.size(); ++i) {
    Line line = text.lines[i];
    for (int j = 0; j < line.arguments; ++j) {
      line.args[j] = sides[i] == Side::pair ? for_pairs(line.args[j], false) : moved[line.args[j]];
    }
    // A line may read what is the same for all lanes: that has a value of its own for the lines.
    moved[i] = put(line, sides[i]);
  }
  for (int& i : text.results) i = for_pairs(i, true);
  for (LinesOfAddition& x : text.additions) {
    x.derivative = for_pairs(x.derivative, true);
    x.index = for_pairs(x.index, true);
    if (x.valid >= 0) x.valid = for_pairs(x.valid, true);
  }
  // Values that depend on nothing are of the lanes, and again of the lines where lines read them.
  std::vector<int> of_line(lines.size(), -1);
  std::vector<Line> more;
  std::vector<Side> more_sides;
  std::vector<int> places(lines.size());
  auto copied = [&](auto& self, int i) -> int {
    if (new_sides[i] == Side::line) return places[i];
    if (of_line[i] < 0) {
      Line line = lines[i];
      for (int j = 0; j < line.arguments; ++j) line.args[j] = self(self, line.args[j]);
      more.push_back(line);
      more_sides.push_back(Side::line);
      of_line[i] = static_cast<int>(more.size()) - 1;
    }
    return of_line[i];
  };
  for (size_t i = 0; i < lines.size(); ++i) {
    Line line = lines[i];
    for (int j = 0; j < line.arguments; ++j) {
      line.args[j] = new_sides[i] == Side::line ? copied(copied, line.args[j]) : places[line.args[j]];
    }
    more.push_back(line);
    more_sides.push_back(new_sides[i]);
    places[i] = static_cast<int>(more.size()) - 1;
  }
  auto placed = [&](int i) { return places[i]; };
  const int count = static_cast<int>(more.size());
  std::vector<int> last(count, -1);
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < more[i].arguments; ++j) {
      int& reader = last[more[i].args[j]];
      // What another side's steps read has to stay.
      reader = more_sides[more[i].args[j]] == more_sides[i] ? std::max(reader, i) : count;
    }
  }
  for (int i : text.results) last[placed(i)] = count;
  for (const LinesOfAddition& x : text.additions) {
    for (int i : {x.derivative, x.index, x.valid}) {
      if (i >= 0) last[placed(i)] = count;
    }
  }
  Steps steps;
  Slots slots[3];
  std::vector<Value> values(count);
  for (int i = 0; i < count; ++i) {
    const Line& line = more[i];
    Slots& own = slots[static_cast<int>(more_sides[i])];
    Step step{line.operation, own.take(), {}, line.number, line.of_call};
    for (int j = 0; j < line.arguments; ++j) step.args[j] = values[line.args[j]];
    for (int j = line.arguments; j < 3; ++j) step.args[j] = step.args[0];
    values[i] = {more_sides[i], step.to};
    // Only now: a step may not write what it reads, for loads read an index after they have written.
    for (int j = 0; j < line.arguments; ++j) {
      int& reader = last[line.args[j]];
      if (reader == i && more_sides[line.args[j]] == more_sides[i]) {
        own.give(values[line.args[j]].slot);
        reader = -1;
      }
    }
    (more_sides[i] == Side::lane   ? steps.lanes
     : more_sides[i] == Side::line ? steps.lines
                                   : steps.pairs)
        .push_back(step);
  }
  steps.lane_slots = slots[0].count();
  steps.line_slots = slots[1].count();
  steps.pair_slots = slots[2].count();
  for (int i : text.results) steps.results.push_back(values[placed(i)]);
  for (const LinesOfAddition& x : text.additions) {
    const bool always = x.valid < 0;
    steps.additions.push_back({x.gradient, x.of_call, values[placed(x.derivative)], values[placed(x.index)],
                               always ? Value{} : values[placed(x.valid)], always});
  }
  return steps;
}

Functions parsed(const char* text) {
  Functions functions;
  std::istringstream lines(text);
  std::string words;
  Lines current;
  Program* program = nullptr;
  auto finish = [&] {
    if (program) *program = {planned(current, kRows), planned(current, kKeys)};
    current = {};
  };
  while (std::getline(lines, words)) {
    std::istringstream line(words);
    std::string name;
    line >> name;
    auto read = [&]<typename T>(T& to) {
      if (!(line >> to)) fail(words);
    };
    auto operand = [&](int& to, int least = 0) {
      read(to);
      if (to < least || to >= static_cast<int>(current.lines.size())) fail(words);
    };
    if (name == "batch") {
      read(functions.batch);
    } else if (name == "program") {
      finish();
      std::string which;
      read(which);
      program = which == "score"          ? &functions.score
                : which == "mask"         ? &functions.mask
                : which == "partial_mask" ? &functions.partial_mask
                : which == "gradient"     ? &functions.gradient
                                          : nullptr;
      if (!program) fail(words);
    } else if (name == "results") {
      for (int i; line >> i;) {
        if (i < 0 || i >= static_cast<int>(current.lines.size())) fail(words);
        current.results.push_back(i);
      }
    } else if (name == "add") {
      LinesOfAddition addition{};
      read(addition.gradient);
      read(addition.of_call);
      operand(addition.derivative);
      operand(addition.index);
      operand(addition.valid, -1);
      current.additions.push_back(addition);
    } else {
      auto found = operations().find(name);
      if (found == operations().end()) fail(words);
      Line parsed{found->second.operation, found->second.arguments};
      for (int i = 0; i < parsed.arguments; ++i) operand(parsed.args[i]);
      if (parsed.operation == Operation::constant) read(parsed.number);
      if (name.starts_with("load_")) {
        read(parsed.number);
        read(parsed.of_call);
      }
      current.lines.push_back(parsed);
    }
  }
  finish();
  return functions;
}

}  // namespace

int Functions::most_slots(Side side) const {
  int most = 0;
  for (const Program* program : {&score, &mask, &partial_mask, &gradient}) {
    for (const Steps* steps : {&program->of_rows, &program->of_keys}) {
      most = std::max(most, side == Side::lane   ? steps->lane_slots
                            : side == Side::line ? steps->line_slots
                                                 : steps->pair_slots);
    }
  }
  return most;
}

const Functions& functions_of(const char* text) {
  static std::mutex mutex;
  static std::unordered_map<const char*, std::unique_ptr<Functions>> all;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Functions>& found = all[text];
  if (!found) found = std::make_unique<Functions>(parsed(text));
  return *found;
}

std::vector<std::string> operation_names() {
  std::vector<std::string> names;
  for (const auto& [name, operation] : operations()) names.push_back(name);
  return names;
}

}  // namespace jax_flash::cpu
