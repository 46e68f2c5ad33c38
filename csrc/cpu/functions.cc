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

// Turns a text into steps. An operation is placed on the side of what it depends on, right before its first reader.
class Planner {
 public:
  Planner(const Lines& text, int of_lanes) : text_(text) {
    const int of_lines = of_lanes == kRows ? kKeys : kRows;
    for (const Line& line : text.lines) {
      int all = own_dependency(line.operation);
      for (int i = 0; i < line.arguments; ++i) all |= depends_[line.args[i]];
      depends_.push_back(all);
      sides_.push_back((all & ~of_lanes) == 0 ? Side::lane : all == of_lines ? Side::line : Side::pair);
    }
    for (auto& places : places_) places.assign(text.lines.size(), -1);
  }

  Steps plan() {
    std::vector<int> results;
    for (int i : text_.results) results.push_back(of_pairs(i));
    for (const LinesOfAddition& x : text_.additions) {
      results.push_back(of_pairs(x.derivative));
      results.push_back(of_pairs(x.index));
      results.push_back(x.valid < 0 ? results.back() : of_pairs(x.valid));
    }
    const std::vector<Value> values = take_slots(results);
    auto next = results.begin();
    for (size_t i = 0; i < text_.results.size(); ++i) steps_.results.push_back(values[*next++]);
    for (const LinesOfAddition& x : text_.additions) {
      const Value derivative = values[*next++], index = values[*next++], valid = values[*next++];
      steps_.additions.push_back({x.gradient, x.of_call, derivative, index, valid, x.valid < 0});
    }
    return std::move(steps_);
  }

 private:
  // A line whose arguments are numbers of placed ones.
  struct Placed {
    Line line;
    Side side;
  };

  int put(Line line, Side side) {
    placed_.push_back({line, side});
    return static_cast<int>(placed_.size()) - 1;
  }

  // The number of line i of the text where steps of a side read it. Steps of lines read what depends on nothing as a
  // value of their own; those of pairs read the lanes as they are, and lines by way of all lanes.
  int place(int i, Side reader) {
    const Side own = sides_[i], side = own == Side::lane && reader == Side::line ? Side::line : own;
    int& found = places_[static_cast<int>(side)][i];
    if (found < 0) {
      Line line = text_.lines[i];
      for (int j = 0; j < line.arguments; ++j) line.args[j] = place(line.args[j], side);
      found = put(line, side);
    }
    if (side != Side::line || reader != Side::pair) return found;
    int& spread = places_[static_cast<int>(Side::pair)][i];
    if (spread < 0) spread = put({Operation::spread, 1, {found}}, Side::pair);
    return spread;
  }

  // As a value of pairs, as results are.
  int of_pairs(int i) {
    const int found = place(i, Side::pair);
    if (sides_[i] != Side::lane) return found;
    int& copy = places_[static_cast<int>(Side::pair)][i];
    if (copy < 0) copy = put({Operation::copy_, 1, {found}}, Side::pair);
    return copy;
  }

  // Gives each step a slot of its side, that of a value that no later step reads if there is one. What another side's
  // steps read, and results, stay.
  std::vector<Value> take_slots(const std::vector<int>& results) {
    const int count = static_cast<int>(placed_.size());
    std::vector<int> last(count, -1);
    for (int i = 0; i < count; ++i) {
      const Placed& reader = placed_[i];
      for (int j = 0; j < reader.line.arguments; ++j) {
        const int read = reader.line.args[j];
        last[read] = placed_[read].side == reader.side ? std::max(last[read], i) : count;
      }
    }
    for (int i : results) last[i] = count;
    std::vector<int> free[3];
    int* counts[] = {&steps_.lane_slots, &steps_.line_slots, &steps_.pair_slots};
    std::vector<Step>* of_side[] = {&steps_.lanes, &steps_.lines, &steps_.pairs};
    std::vector<Value> values(count);
    for (int i = 0; i < count; ++i) {
      const auto& [line, side] = placed_[i];
      const int own = static_cast<int>(side);
      int slot = *counts[own];
      if (free[own].empty()) {
        ++*counts[own];
      } else {
        slot = free[own].back();
        free[own].pop_back();
      }
      Step step{line.operation, slot, {}, line.number, line.of_call};
      for (int j = 0; j < 3; ++j) step.args[j] = j < line.arguments ? values[line.args[j]] : step.args[0];
      values[i] = {side, slot};
      of_side[own]->push_back(step);
      // Only now: no step writes what it reads.
      for (int j = 0; j < line.arguments; ++j) {
        if (last[line.args[j]] != i) continue;
        free[own].push_back(values[line.args[j]].slot);
        last[line.args[j]] = -1;
      }
    }
    return values;
  }

  const Lines& text_;
  std::vector<int> depends_;
  std::vector<Side> sides_;
  std::vector<int> places_[3];  // for each side, where a line of the text is on it; -1: nowhere yet
  std::vector<Placed> placed_;
  Steps steps_;
};

Functions parsed(const char* text) {
  Functions functions;
  std::istringstream lines(text);
  std::string words;
  Lines current;
  Program* program = nullptr;
  auto finish = [&] {
    if (program) *program = {Planner(current, kRows).plan(), Planner(current, kKeys).plan()};
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
