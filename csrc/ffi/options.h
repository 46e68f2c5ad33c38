// Decodes the option record from the attributes of XLA's call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>

#include "options.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// The text of a call's functions as Options has it.
inline const char* interned(std::string_view text) {
  if (text.empty()) return nullptr;
  static std::mutex mutex;
  static std::set<std::string, std::less<>> all;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = all.find(text);
  if (found == all.end()) found = all.emplace(text).first;
  return found->c_str();
}

// Calls read(name, field) for the fields of the option record, in its order.
template <typename Read>
void for_each_field(Options& options, Read read) {
#define JAX_FLASH_READ(type, name) read(#name, options.name);
#define JAX_FLASH_READ_FEATURE(type, name, absent) read(#name, options.name);
#define JAX_FLASH_READ_OPERAND(type, name, dims) read("has_" #name, options.has_##name);
#define JAX_FLASH_READ_TRAINABLE(type, name, dims) \
  read("has_" #name, options.has_##name);          \
  read("has_d" #name, options.has_d##name);
  JAX_FLASH_OPTIONS(JAX_FLASH_READ, JAX_FLASH_READ, JAX_FLASH_READ_FEATURE, JAX_FLASH_READ_OPERAND,
                    JAX_FLASH_READ_TRAINABLE)
#undef JAX_FLASH_READ_TRAINABLE
#undef JAX_FLASH_READ_OPERAND
#undef JAX_FLASH_READ_FEATURE
#undef JAX_FLASH_READ
}

}  // namespace jax_flash

// The attributes of a call are the option record, one for each field, decoded by name. XLA's own decoding of a struct
// searches for each field from the first attribute on; but attributes are sorted by name, so that the index of each is
// known at compile time.
namespace xla::ffi {

template <>
struct AttrsBinding<jax_flash::Options> {
  using Attrs = jax_flash::Options;
};

template <>
struct AttrDecoding<jax_flash::Options> {
  using Type = jax_flash::Options;

#define JAX_FLASH_NAME(type, name) #name,
#define JAX_FLASH_FEATURE_NAME(type, name, absent) #name,
#define JAX_FLASH_OPERAND_NAME(type, name, dims) "has_" #name,
#define JAX_FLASH_TRAINABLE_NAME(type, name, dims) "has_" #name, "has_d" #name,
  static constexpr std::string_view kNames[] = {JAX_FLASH_OPTIONS(JAX_FLASH_NAME, JAX_FLASH_NAME,
                                                                  JAX_FLASH_FEATURE_NAME, JAX_FLASH_OPERAND_NAME,
                                                                  JAX_FLASH_TRAINABLE_NAME) "functions"};
#undef JAX_FLASH_TRAINABLE_NAME
#undef JAX_FLASH_OPERAND_NAME
#undef JAX_FLASH_FEATURE_NAME
#undef JAX_FLASH_NAME
  static constexpr size_t kCount = std::size(kNames);

  // The index of each name in sorted order.
  static constexpr std::array<size_t, kCount> places() {
    std::array<size_t, kCount> places{};
    for (size_t i = 0; i < kCount; ++i) {
      for (std::string_view other : kNames) places[i] += other < kNames[i];
    }
    return places;
  }

  static std::optional<Type> Decode(XLA_FFI_AttrType, void* attr, DiagnosticEngine& diagnostic) {
    static constexpr std::array<size_t, kCount> kPlaces = places();
    const auto& attrs = *static_cast<const XLA_FFI_Attrs*>(attr);
    Type options{};
    bool complete = attrs.size == static_cast<int64_t>(kCount);
    size_t next = 0;
    auto decode = [&](auto& field) {
      const size_t name = next++, place = kPlaces[name];
      if (!complete) return;
      const XLA_FFI_ByteSpan& found = *attrs.names[place];
      complete = std::string_view(found.ptr, found.len) == kNames[name];
      if (!complete) return;
      auto value = AttrDecoding<std::remove_reference_t<decltype(field)>>::Decode(attrs.types[place],
                                                                                  attrs.attrs[place], diagnostic);
      complete = value.has_value();
      if (complete) field = *value;
    };
    jax_flash::for_each_field(options, [&](const char*, auto& field) { decode(field); });
    std::string_view functions;
    decode(functions);
    options.functions = jax_flash::interned(functions);
    if (complete) return options;
    diagnostic.Emit("The attributes are not those of jax_flash's options");
    return std::nullopt;
  }
};

}  // namespace xla::ffi
