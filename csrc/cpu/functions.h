// Score and mask functions on CPUs: programs of the operations of operations.h, which the kernels evaluate for the
// pairs of a tile.
//
// A tile has lines of lanes. What depends on nothing, or on what the lanes stand for, is computed once for a tile's
// lanes, what depends on what the lines stand for once for its lines, what depends on q - kv alone once for its
// diagonals where the rows are those of one head that follow one another, what depends on an element of a small array
// alone once for its elements, and only the rest for each pair.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "operations.h"

namespace jax_flash::cpu {

enum class Operation : uint8_t {
  // The arguments of functions; `call` is which of the calls that vmap has joined a batch entry is of.
  score,
  b,
  h,
  q,
  kv,
  call,
  constant,
  spread,    // a value of the lines, in all lanes
  distance,  // q - kv
  element,   // of the values that the second argument has for all elements of an array, that of the index
#define JAX_FLASH_NAME(name, ...) name##_,
  JAX_FLASH_CPU_LIBRARY(JAX_FLASH_NAME) JAX_FLASH_CPU_OPERATIONS(JAX_FLASH_NAME, JAX_FLASH_NAME, JAX_FLASH_NAME)
      JAX_FLASH_CPU_LOADS(JAX_FLASH_NAME)
#undef JAX_FLASH_NAME
};

enum class Side : uint8_t { lane, line, pair, diagonal, element };
constexpr int kSides = 5;

constexpr int kMostElements = 64;  // of an array for whose elements values are computed

// The slot of the scores, which steps read where they are.
constexpr int kSlotOfScores = -1;

struct Value {
  Side side = Side::lane;
  int slot = 0;
};

struct Step {
  Operation operation;
  int to = 0;       // a slot of the step's own side
  Value args[3]{};  // unused ones repeat the first; a load of pairs may have a second, of lines, to add to its index
  int number = 0;   // bits of a constant; a load: which captured array
  int64_t elements = 0;  // of the array that is loaded from
  int64_t of_call = 0;   // as many elements, if each of the calls that vmap has joined has its own; 0: all share them
};

// Adds to an element of the gradient of a captured array: the gradient of the score times `derivative`.
struct Addition {
  int gradient;
  int64_t of_call;
  Value derivative, index, valid;
  bool always;  // `valid` has no meaning
  // What `index` is a value of. Where it is not one of pairs, all pairs of a lane, line or diagonal add to one element,
  // and `valid` has no meaning.
  Side side;
};

// A program for tiles whose lanes are rows, or keys.
struct Steps {
  std::vector<Step> of[kSides];
  int slots[kSides]{};
  std::vector<Value> results;  // all of pairs
  std::vector<Addition> additions;
};
struct Program {
  Steps of_rows[2], of_keys[2];  // in the lanes; without and with steps of diagonals

  const Steps& steps(bool lanes_are_rows, bool has_diagonals) const {
    return (lanes_are_rows ? of_rows : of_keys)[has_diagonals];
  }
  size_t results() const { return of_rows[0].results.size(); }
  bool has_diagonals() const { return !of_rows[1].of[static_cast<int>(Side::diagonal)].empty(); }
  explicit operator bool() const { return results() != 0 || !of_rows[0].additions.empty(); }
};

// Those of a call. `score` has the results value and, in a backward pass, derivative; `gradient` has additions alone.
struct Functions {
  int batch = 0;  // batch entries of each of the calls that vmap has joined; 0: there is one
  Program score, mask, partial_mask, gradient;

  int most_slots(Side side) const;
  int most_additions() const;
};

// Of a text of jax_flash/_functions/cpu.py, parsed once for each pointer: see Options::functions. Throws
// std::invalid_argument.
const Functions& functions_of(const char* text);

// The names of all operations that a text may have.
std::vector<std::string> operation_names();

}  // namespace jax_flash::cpu
