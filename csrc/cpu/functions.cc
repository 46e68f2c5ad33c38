#include "functions.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
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
  int64_t elements = 0, of_call = 0;

  bool loads() const { return operation >= Operation::load_bool_; }
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

// What a value depends on. Rows of several heads may share a tile.
constexpr int kRows = 1, kKeys = 2, kScore = 4, kHead = 8, kDiagonal = 16;
int own_dependency(Operation operation) {
  switch (operation) {
    case Operation::h: return kHead;
    case Operation::q: return kRows;
    case Operation::kv: return kKeys;
    case Operation::score: return kScore;
    default: return 0;
  }
}

// Turns a text into steps. An operation is placed on the side of what it depends on, right before its first reader.
class Planner {
 public:
  Planner(const Lines& text, int of_lanes, bool has_diagonals) : text_(text), has_diagonals_(has_diagonals) {
    for (const Line& line : text.lines) {
      int all = own_dependency(line.operation);
      for (int i = 0; i < line.arguments; ++i) all |= depends_[line.args[i]];
      if (is_of_distance(line)) all = kDiagonal;
      depends_.push_back(all);
      sides_.push_back(side_of(all, of_lanes));
    }
    for (auto& places : places_) places.assign(text.lines.size(), -1);
    find_elements();
  }

  Steps plan() {
    std::vector<int> results;
    for (int i : text_.results) results.push_back(of_pairs(i));
    for (const LinesOfAddition& x : text_.additions) {
      results.push_back(of_pairs(x.derivative));
      const Side side = side_of_index(x);
      results.push_back(side == Side::pair ? of_pairs(x.index)
                                           : place(x.index, side == Side::line ? side : Side::pair));
      results.push_back(x.valid < 0 ? results.back() : of_pairs(x.valid));
    }
    const std::vector<Value> values = take_slots(results);
    auto next = results.begin();
    for (size_t i = 0; i < text_.results.size(); ++i) steps_.results.push_back(values[*next++]);
    for (const LinesOfAddition& x : text_.additions) {
      const Value derivative = values[*next++], index = values[*next++], valid = values[*next++];
      steps_.additions.push_back({x.gradient, x.of_call, derivative, index, valid, x.valid < 0, side_of_index(x)});
    }
    return std::move(steps_);
  }

 private:
  // A line whose arguments are numbers of placed ones.
  struct Placed {
    Line line;
    Side side;
  };

  // Whether the operation is the distance, or compares it with 0.
  bool is_of_distance(const Line& line) const {
    if (!has_diagonals_ || line.arguments != 2) return false;
    const Operation x = text_.lines[line.args[0]].operation, y = text_.lines[line.args[1]].operation;
    const bool of_both = (x == Operation::q && y == Operation::kv) || (x == Operation::kv && y == Operation::q);
    switch (line.operation) {
      case Operation::sub_i_:
      case Operation::eq_i_:
      case Operation::ne_i_:
      case Operation::lt_i_:
      case Operation::le_i_:
      case Operation::gt_i_:
      case Operation::ge_i_: return of_both;
      default: return false;
    }
  }
  Side side_of_index(const LinesOfAddition& x) const { return x.valid < 0 ? sides_[x.index] : Side::pair; }
  static Side side_of(int all, int of_lanes) {
    const int of_rows = kRows | kHead, lanes = of_lanes == kRows ? of_rows : kKeys;
    if ((all & ~lanes) == 0) return Side::lane;
    if ((all & lanes) == 0 && (all & (kScore | kDiagonal)) == 0) return Side::line;
    return (all & kDiagonal) != 0 && (all & ~(kDiagonal | kHead)) == 0 ? Side::diagonal : Side::pair;
  }

  // Which lines of pairs depend on one element of one small array alone: they are computed for all its elements, and
  // pairs look one up. Where they would look up several values of one element, they look up the element and compute the
  // rest.
  void find_elements() {
    const int count = static_cast<int>(text_.lines.size());
    std::vector<bool> needed(count);
    auto need = [&](int i) { needed[i] = true; };
    for_results(need);
    for (int i = count - 1; i >= 0; --i) {
      for (int j = 0; needed[i] && j < text_.lines[i].arguments; ++j) need(text_.lines[i].args[j]);
    }
    of_element_.assign(count, -1);
    std::vector<std::set<int>> read(count);  // by pairs, of each array's element
    auto read_of_pairs = [&](int i) {
      if (of_element_[i] >= 0) read[of_element_[i]].insert(i);
    };
    for (int i = 0; i < count; ++i) {
      const Line& line = text_.lines[i];
      if (!needed[i]) continue;
      if (sides_[i] == Side::pair) of_element_[i] = element_of(i);
      for (int j = 0; (of_element_[i] < 0 || line.loads()) && j < line.arguments; ++j) read_of_pairs(line.args[j]);
    }
    for_results(read_of_pairs);
    for (int i = 0; i < count; ++i) {
      if (of_element_[i] >= 0 && of_element_[i] != i && read[of_element_[i]].size() > 1) of_element_[i] = -1;
    }
  }
  // The load whose element line i depends on; -1: it depends on anything else.
  int element_of(int i) const {
    const Line& line = text_.lines[i];
    if (line.loads()) return 0 < line.elements && line.elements <= kMostElements ? i : -1;
    int found = -1;
    for (int j = 0; j < line.arguments; ++j) {
      const int arg = line.args[j], of = of_element_[arg];
      if (text_.lines[arg].operation == Operation::constant) continue;
      if (of < 0 || (found >= 0 && found != of)) return -1;
      found = of;
    }
    return found;
  }
  template <typename Body>
  void for_results(Body body) const {
    for (int i : text_.results) body(i);
    for (const LinesOfAddition& x : text_.additions) {
      body(x.derivative);
      body(x.index);
      if (x.valid >= 0) body(x.valid);
    }
  }

  int put(Line line, Side side) {
    placed_.push_back({line, side});
    return static_cast<int>(placed_.size()) - 1;
  }

  // An operation of the distance: of it and 0, in the order of q and kv.
  Line of_distance(const Line& line) {
    if (distance_ < 0) distance_ = put({Operation::distance}, Side::diagonal);
    const bool in_order = text_.lines[line.args[0]].operation == Operation::q;
    if (line.operation == Operation::sub_i_) return {in_order ? Operation::copy_ : Operation::neg_i_, 1, {distance_}};
    if (zero_ < 0) zero_ = put({Operation::constant}, Side::diagonal);
    return {line.operation, 2, {in_order ? distance_ : zero_, in_order ? zero_ : distance_}};
  }

  // Of an index that is a sum of a value of the lanes and one of the lines a load reads these, so that the sum is
  // computed for no pair.
  Line load_of_pairs(int i) {
    Line line = text_.lines[i];
    const int at = line.args[0];
    const Line& index = text_.lines[at];
    if (index.operation == Operation::add_i_ && places_[static_cast<int>(Side::pair)][at] < 0) {
      int x = index.args[0], y = index.args[1];
      if (sides_[x] == Side::line) std::swap(x, y);
      if (sides_[x] == Side::lane && sides_[y] == Side::line) {
        line.arguments = 2;
        line.args[0] = place(x, Side::pair);
        line.args[1] = place(y, Side::line);
        return line;
      }
    }
    line.args[0] = place(at, Side::pair);
    return line;
  }

  // The number of line i of the text where steps of a side read it. Steps of lines read what depends on nothing as a
  // value of their own, and so do those of diagonals, of the head too, and of elements; those of pairs read the lanes
  // and the diagonals as they are, lines by way of all lanes, and of elements that of their index.
  int place(int i, Side reader) {
    const Side own = sides_[i];
    const bool copies =
        reader == Side::diagonal || reader == Side::element || (reader == Side::line && own == Side::lane);
    const Side side = copies ? reader : own;
    int& found = places_[static_cast<int>(side)][i];
    if (found < 0) {
      Line line = text_.lines[i];
      if (is_of_distance(line)) {
        line = of_distance(line);
      } else if (side == Side::pair && of_element_[i] >= 0) {
        const Line& load = text_.lines[of_element_[i]];
        const int index = place(load.args[0], Side::pair), values = place(i, Side::element);
        line = {Operation::element, 2, {index, values}, 0, load.elements};
      } else if (side == Side::element && line.loads()) {
        line.arguments = 0;  // all elements
      } else if (side == Side::pair && line.loads()) {
        line = load_of_pairs(i);
      } else {
        for (int j = 0; j < line.arguments; ++j) line.args[j] = place(line.args[j], side);
      }
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
    if (sides_[i] != Side::lane && sides_[i] != Side::diagonal) return found;
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
    std::vector<int> free[kSides];
    std::vector<Value> values(count);
    for (int i = 0; i < count; ++i) {
      const auto& [line, side] = placed_[i];
      const int own = static_cast<int>(side);
      if (line.operation == Operation::score) {
        values[i] = {side, kSlotOfScores};
        continue;
      }
      int slot = steps_.slots[own];
      if (free[own].empty()) {
        ++steps_.slots[own];
      } else {
        slot = free[own].back();
        free[own].pop_back();
      }
      Step step{line.operation, slot, {}, line.number, line.elements, line.of_call};
      for (int j = 0; j < 3; ++j) step.args[j] = j < line.arguments ? values[line.args[j]] : step.args[0];
      values[i] = {side, slot};
      steps_.of[own].push_back(step);
      // Only now: no step writes what it reads.
      for (int j = 0; j < line.arguments; ++j) {
        if (last[line.args[j]] != i || values[line.args[j]].slot == kSlotOfScores) continue;
        free[own].push_back(values[line.args[j]].slot);
        last[line.args[j]] = -1;
      }
    }
    return values;
  }

  const Lines& text_;
  std::vector<int> depends_;
  std::vector<Side> sides_;
  std::vector<int> of_element_;  // the load whose element a line of pairs depends on alone; -1: on anything else
  bool has_diagonals_;
  int distance_ = -1, zero_ = -1;    // placed lines
  std::vector<int> places_[kSides];  // for each side, where a line of the text is on it; -1: nowhere yet
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
    for (int diagonals = 0; program && diagonals < 2; ++diagonals) {
      program->of_rows[diagonals] = Planner(current, kRows, diagonals).plan();
      program->of_keys[diagonals] = Planner(current, kKeys, diagonals).plan();
    }
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
      if (parsed.loads()) {
        read(parsed.number);
        read(parsed.elements);
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
    for (int i = 0; i < 2; ++i) {
      for (const Steps* steps : {&program->of_rows[i], &program->of_keys[i]}) {
        most = std::max(most, steps->slots[static_cast<int>(side)]);
      }
    }
  }
  return most;
}

int Functions::most_additions() const { return static_cast<int>(gradient.of_rows[0].additions.size()); }

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
