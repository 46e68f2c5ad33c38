// Mirror of XLA's interface for recording a handler's kernels into command buffers (CUDA graphs); see kKnown below for
// the versions.
// XLA calls this interface unstable, and no jaxlib before 0.11.2 has its header. So that a library that is built with
// an older jaxlib can record too, the structs are declared here under names of our own, and used only if the running
// jaxlib has one of the versions that they are known to match. A build whose jaxlib has the header compares them with
// it, below.

#pragma once

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/c_api.h"
#if __has_include("xla/ffi/api/record_c_api.h")
#include "xla/ffi/api/record_c_api.h"
#endif

namespace jax_flash::recording {

struct Version {
  int major, minor;
  constexpr bool operator==(const Version&) const = default;
};

// Versions of XLA's FFI API and of this interface that have these structs.
struct Versions {
  Version ffi, record;
};
inline constexpr Versions kKnown[] = {
    {{0, 4}, {0, 1}},  // jaxlib 0.11.2
    {{0, 5}, {0, 2}},  // jaxlib 0.12.0: adds a format of kernels, which is not used here
};

constexpr bool knows_ffi(Version ffi) {
  for (const Versions& known : kKnown) {
    if (known.ffi == ffi) return true;
  }
  return false;
}

constexpr bool knows_record(Version record) {
  for (const Versions& known : kKnown) {
    if (known.record == record) return true;
  }
  return false;
}

// Opaque types of XLA.
struct Context;
struct Command;

enum class Action : uint32_t { create = 0, update = 1 };
enum class Format : uint32_t { ptx = 0, cubin = 1 };
enum class Kind : uint32_t { device_pointer = 0, host_value = 1 };

struct Dim3 {
  int32_t x, y, z;
};

// A cluster of (0, 0, 0) means no cluster.
struct Dims {
  Dim3 grid, block, cluster;
};

// A host value has a size and is copied; a pointer has size 0.
struct Argument {
  const void* address;
  int64_t size;
  Kind kind;
};

struct Arguments {
  const Argument* values;
  int64_t count;
};

// The functions that are called here; memory copies, a fallback to capture and empty nodes follow them in XLA's struct
// of six.
struct Functions {
  XLA_FFI_Error* (*create_launch)(Context* context, const char* name, const void* image, int64_t image_bytes,
                                  Format format, Dims dims, uint32_t shared_bytes, int32_t overlaps,
                                  const Arguments* arguments, const Command* const* after, uint32_t after_count,
                                  const Command** command);
  XLA_FFI_Error* (*update_launch)(Context* context, const Command* command, const Arguments* arguments);
};

struct Frame {
  Context* context;
  const Functions* functions;
  Action action;
  const Command** commands;
  int64_t* count;
  int64_t capacity;
};

// The extension of a call frame by which XLA asks a handler to record, and its number.
inline constexpr int64_t kExtension = 128;

struct Extension {
  size_t struct_size;
  int64_t type;
  int32_t major, minor;
  const void* next;
  const Frame* frame;
};

struct FindExtension {
  size_t struct_size;
  void* extension_start;
  void* call;
  int64_t type;
  const Extension* found;
};

// XLA's function table from 0.4 on: that of 0.2 and 0.3, and one more function.
struct Api {
  std::byte before[offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(void*)];
  XLA_FFI_Error* (*find_extension)(FindExtension*);
};

// The arguments of XLA_FFI_Handler_Register from 0.4 on, with one more handler before the traits.
struct Registration {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_ByteSpan name, platform;
  XLA_FFI_Handler *instantiate, *prepare, *initialize, *execute, *record;
  XLA_FFI_Handler_Traits traits;
};
inline constexpr size_t kRegistrationSize = offsetof(Registration, traits) + sizeof(XLA_FFI_Handler_Traits);

// Checks that need no header of XLA's.
static_assert(sizeof(Dims) == 36 && sizeof(Argument) == 24 && sizeof(Arguments) == 16 && sizeof(Frame) == 48 &&
              sizeof(Extension) == 40 && sizeof(FindExtension) == 40 && offsetof(Api, find_extension) == 192 &&
              kRegistrationSize == 92);

// A header of unknown versions may differ; a library that is built with it does not record, and XLA captures its
// launches.
#ifdef XLA_FFI_Extension_Record
#if XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR <= 5 && XLA_FFI_Extension_Record_MajorVersion == 0 && \
    XLA_FFI_Extension_Record_MinorVersion <= 2
#define JAX_FLASH_SAME_SIZE(ours, theirs) \
  static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs), #theirs " has another size")
#define JAX_FLASH_SAME_PLACE(ours, ours_member, theirs, theirs_member)            \
  static_assert(offsetof(ours, ours_member) == offsetof(theirs, theirs_member) && \
                    sizeof(ours::ours_member) == sizeof(theirs::theirs_member),   \
                #theirs "::" #theirs_member " has another place or size")
#define JAX_FLASH_SAME_VALUE(ours, theirs) static_assert(int64_t(ours) == int64_t(theirs), #theirs " has another value")

static_assert(knows_ffi({XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}) &&
              knows_record({XLA_FFI_Extension_Record_MajorVersion, XLA_FFI_Extension_Record_MinorVersion}));

JAX_FLASH_SAME_VALUE(kExtension, XLA_FFI_Extension_Record);
JAX_FLASH_SAME_VALUE(Action::create, XLA_FFI_RecordAction_Create);
JAX_FLASH_SAME_VALUE(Action::update, XLA_FFI_RecordAction_Update);
JAX_FLASH_SAME_SIZE(Action, XLA_FFI_RecordAction);
JAX_FLASH_SAME_VALUE(Format::ptx, XLA_FFI_SourceFormat_PTX);
JAX_FLASH_SAME_VALUE(Format::cubin, XLA_FFI_SourceFormat_CUBIN);
JAX_FLASH_SAME_SIZE(Format, XLA_FFI_SourceFormat);
JAX_FLASH_SAME_VALUE(Kind::device_pointer, XLA_FFI_KernelArgType_DevicePtr);
JAX_FLASH_SAME_VALUE(Kind::host_value, XLA_FFI_KernelArgType_HostValue);
JAX_FLASH_SAME_SIZE(Kind, XLA_FFI_KernelArgType);

JAX_FLASH_SAME_SIZE(Dim3, XLA_FFI_Dim3);
JAX_FLASH_SAME_PLACE(Dim3, x, XLA_FFI_Dim3, x);
JAX_FLASH_SAME_PLACE(Dim3, y, XLA_FFI_Dim3, y);
JAX_FLASH_SAME_PLACE(Dim3, z, XLA_FFI_Dim3, z);
JAX_FLASH_SAME_SIZE(Dims, XLA_FFI_LaunchDims);
JAX_FLASH_SAME_PLACE(Dims, grid, XLA_FFI_LaunchDims, grid);
JAX_FLASH_SAME_PLACE(Dims, block, XLA_FFI_LaunchDims, block);
JAX_FLASH_SAME_PLACE(Dims, cluster, XLA_FFI_LaunchDims, cluster);
JAX_FLASH_SAME_SIZE(Argument, XLA_FFI_KernelArg);
JAX_FLASH_SAME_PLACE(Argument, address, XLA_FFI_KernelArg, arg_address);
JAX_FLASH_SAME_PLACE(Argument, size, XLA_FFI_KernelArg, size);
JAX_FLASH_SAME_PLACE(Argument, kind, XLA_FFI_KernelArg, type);
JAX_FLASH_SAME_SIZE(Arguments, XLA_FFI_KernelArgs);
JAX_FLASH_SAME_PLACE(Arguments, values, XLA_FFI_KernelArgs, args);
JAX_FLASH_SAME_PLACE(Arguments, count, XLA_FFI_KernelArgs, num_args);

JAX_FLASH_SAME_PLACE(Functions, create_launch, XLA_FFI_RecordApi, create_launch);
JAX_FLASH_SAME_PLACE(Functions, update_launch, XLA_FFI_RecordApi, update_launch);
JAX_FLASH_SAME_SIZE(Frame, XLA_FFI_RecordFrame);
JAX_FLASH_SAME_PLACE(Frame, context, XLA_FFI_RecordFrame, record_ctx);
JAX_FLASH_SAME_PLACE(Frame, functions, XLA_FFI_RecordFrame, api);
JAX_FLASH_SAME_PLACE(Frame, action, XLA_FFI_RecordFrame, action);
JAX_FLASH_SAME_PLACE(Frame, commands, XLA_FFI_RecordFrame, commands);
JAX_FLASH_SAME_PLACE(Frame, count, XLA_FFI_RecordFrame, num_commands);
JAX_FLASH_SAME_PLACE(Frame, capacity, XLA_FFI_RecordFrame, max_commands);

JAX_FLASH_SAME_SIZE(Extension, XLA_FFI_Record_Extension);
JAX_FLASH_SAME_PLACE(Extension, struct_size, XLA_FFI_Record_Extension, extension_base.struct_size);
JAX_FLASH_SAME_PLACE(Extension, type, XLA_FFI_Record_Extension, extension_base.id.extension_type);
JAX_FLASH_SAME_PLACE(Extension, major, XLA_FFI_Record_Extension, extension_base.id.major_version);
JAX_FLASH_SAME_PLACE(Extension, minor, XLA_FFI_Record_Extension, extension_base.id.minor_version);
JAX_FLASH_SAME_PLACE(Extension, next, XLA_FFI_Record_Extension, extension_base.next);
JAX_FLASH_SAME_PLACE(Extension, frame, XLA_FFI_Record_Extension, record_frame);
JAX_FLASH_SAME_SIZE(FindExtension, XLA_FFI_InvokeContext_FindExtension_Args);
JAX_FLASH_SAME_PLACE(FindExtension, call, XLA_FFI_InvokeContext_FindExtension_Args, ctx);
JAX_FLASH_SAME_PLACE(FindExtension, type, XLA_FFI_InvokeContext_FindExtension_Args, extension_type);
JAX_FLASH_SAME_PLACE(FindExtension, found, XLA_FFI_InvokeContext_FindExtension_Args, extension);
JAX_FLASH_SAME_PLACE(Api, find_extension, XLA_FFI_Api, XLA_FFI_InvokeContext_FindExtension);

JAX_FLASH_SAME_SIZE(Registration, XLA_FFI_Handler_Register_Args);
JAX_FLASH_SAME_PLACE(Registration, name, XLA_FFI_Handler_Register_Args, name);
JAX_FLASH_SAME_PLACE(Registration, platform, XLA_FFI_Handler_Register_Args, platform);
JAX_FLASH_SAME_PLACE(Registration, instantiate, XLA_FFI_Handler_Register_Args, bundle.instantiate);
JAX_FLASH_SAME_PLACE(Registration, prepare, XLA_FFI_Handler_Register_Args, bundle.prepare);
JAX_FLASH_SAME_PLACE(Registration, initialize, XLA_FFI_Handler_Register_Args, bundle.initialize);
JAX_FLASH_SAME_PLACE(Registration, execute, XLA_FFI_Handler_Register_Args, bundle.execute);
JAX_FLASH_SAME_PLACE(Registration, record, XLA_FFI_Handler_Register_Args, bundle.record);
JAX_FLASH_SAME_PLACE(Registration, traits, XLA_FFI_Handler_Register_Args, traits);
JAX_FLASH_SAME_VALUE(kRegistrationSize, XLA_FFI_Handler_Register_Args_STRUCT_SIZE);

// Compares functions: return type, number of arguments and their sizes.
template <typename Ours, typename Theirs>
inline constexpr bool kSameCall = false;
template <typename R, typename... Ours, typename... Theirs>
inline constexpr bool kSameCall<R (*)(Ours...), R (*)(Theirs...)> = [] {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) return (... && (sizeof(Ours) == sizeof(Theirs)));
  return false;
}();
static_assert(kSameCall<decltype(Functions::create_launch), decltype(XLA_FFI_RecordApi::create_launch)>);
static_assert(kSameCall<decltype(Functions::update_launch), decltype(XLA_FFI_RecordApi::update_launch)>);

#undef JAX_FLASH_SAME_VALUE
#undef JAX_FLASH_SAME_PLACE
#undef JAX_FLASH_SAME_SIZE
#endif
#endif

}  // namespace jax_flash::recording
