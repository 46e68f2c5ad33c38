// The Python module.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu/cpu.h"
#include "cpu/functions.h"
#include "cuda/host/cuda.h"
#include "cuda/host/disk_cache.h"
#include "cuda/host/jit.h"
#include "cuda/host/tuned.h"
#include "ffi/decode.h"
#include "ffi/handlers.h"
#include "ffi/options.h"
#include "ffi/recording.h"

namespace nb = nanobind;

namespace jax_flash {
namespace {

DType named_dtype(const std::string& name) {
  if (name == "float16") return DType::f16;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float32") return DType::f32;
  if (name == "float64") return DType::f64;
  throw std::invalid_argument("dtype must be float16, bfloat16, float32 or float64, got " + name);
}

const std::vector<std::string> kPasses{
#define JAX_FLASH_PASS(pass) #pass,
    JAX_FLASH_PASSES(JAX_FLASH_PASS)
#undef JAX_FLASH_PASS
};

Pass named_pass(const std::string& name) {
  std::string known;
  for (const std::string& pass : kPasses) known += (known.empty() ? "" : ", ") + pass;
#define JAX_FLASH_PASS(pass) \
  if (name == #pass) return Pass::pass;
  JAX_FLASH_PASSES(JAX_FLASH_PASS)
#undef JAX_FLASH_PASS
  throw std::invalid_argument("pass_ must be one of " + known + ", got " + name);
}

// The option record from the attributes of a call; options that are not named are absent.
Options named_options(const nb::dict& attributes) {
  Options options{};
  options.sequences = 1;
  size_t known = 0;
  for_each_field(options, [&](const char* name, auto& field) {
    if (!attributes.contains(name)) return;
    field = nb::cast<std::remove_reference_t<decltype(field)>>(attributes[name]);
    ++known;
  });
  if (attributes.contains("functions")) {
    options.functions = interned(nb::cast<std::string>(attributes["functions"]));
    ++known;
  }
  if (known != attributes.size()) throw std::invalid_argument("options must be named as in the option record");
  return options;
}

cuda::Variants named_variants(const std::vector<std::string>& dtypes, const std::vector<std::pair<int, int>>& head_dims,
                              const std::vector<nb::dict>& options, const std::vector<std::string>& passes) {
  cuda::Variants wanted;
  wanted.head_dims = head_dims;
  for (const std::string& dtype : dtypes) wanted.dtypes.push_back(named_dtype(dtype));
  for (const nb::dict& attributes : options) wanted.options.push_back(named_options(attributes));
  for (const std::string& pass : passes) wanted.passes.push_back(named_pass(pass));
  return wanted;
}

nb::dict row_of(const cuda::Kernel& k) {
  nb::dict row;
  row["name"] = k.name;
  row["path"] = k.path;
  row["pass"] = k.pass;
  row["head_dim"] = k.head_dim;
  row["value_head_dim"] = k.value_head_dim;
  row["block_q"] = k.block_q;
  row["block_kv"] = k.block_kv;
  row["registers"] = k.registers;
  row["shared_bytes"] = k.shared_bytes;
  row["threads"] = k.threads;
  row["spill_bytes"] = k.spill_bytes;
  row["local_bytes"] = k.local_bytes;
  row["cubin_bytes"] = k.cubin_bytes;
  row["float32_registers"] = k.float32_registers;
  row["float32_local_bytes"] = k.float32_local_bytes;
  row["compiler_warnings"] = k.compiler_warnings;
  return row;
}

// A tile row from a dictionary, which must have all of its fields.
cuda::TileRow named_tile_row(const nb::dict& named) {
  cuda::TileRow row{};
#define JAX_FLASH_FIELD(field) row.field = nb::cast<int>(named[#field]);
  JAX_FLASH_TILE_FIELDS(JAX_FLASH_FIELD)
#undef JAX_FLASH_FIELD
  return row;
}

// The fields of Problem that plans and scratch depend on, except the head dims.
Problem shape_of(const Options& options, int batch, int q_length, int kv_length, int q_heads, int kv_heads) {
  Problem p{};
  p.options = options;
  p.batch = batch;
  p.q_length = q_length;
  p.kv_length = kv_length;
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  return p;
}

// The elements of scratch of a call, from Python's description of it.
struct Scratch {
  Pass pass;
  bool cuda;
  DType dtype;
  Problem problem;

  Scratch(const std::string& pass_, const std::string& platform, const std::string& dtype_, const nb::dict& options,
          int q_length, int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim,
          const nb::dict& shapes, const std::vector<int64_t>& dcaptured_elements)
      : pass(named_pass(pass_)),
        cuda(platform == "cuda"),
        dtype(named_dtype(dtype_)),
        problem(shape_of(named_options(options), 1, q_length, kv_length, q_heads, kv_heads)) {
    problem.head_dim = head_dim / limbs_of(problem.options);
    problem.value_head_dim = value_head_dim / limbs_of(problem.options);
    if (dcaptured_elements.size() > kMostCaptured) throw std::invalid_argument("too many gradients of captured arrays");
    std::copy(dcaptured_elements.begin(), dcaptured_elements.end(), problem.dcaptured_elements);
    auto read = [&](const char* name, auto found) {
      if constexpr (std::is_same_v<decltype(found), Strides*>) {
        if (shapes.contains(name)) *found = strides(nb::cast<std::vector<int64_t>>(shapes[name]));
      }
    };
#define JAX_FLASH_NOTHING(...)
#define JAX_FLASH_OPERAND(type, name, dims) read(#name, JAX_FLASH_FIND(problem, name##_strides));
    JAX_FLASH_OPTIONS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_OPERAND, JAX_FLASH_OPERAND)
#undef JAX_FLASH_OPERAND
#undef JAX_FLASH_NOTHING
  }

  int64_t of_batch(int batch) {
    problem.batch = batch;
    if (cuda) return (pass == Pass::forward ? cuda::forward_scratch : cuda::backward_scratch)(dtype, problem);
    return pass == Pass::forward ? 0 : cpu::backward_scratch(dtype, problem);
  }

  // (a, b) with of_batch(B) <= a * B + b for all B. From kMany batch entries on there is work for all threads and
  // multiprocessors, so that no call is split, and scratch grows linearly; but for what long calls have, and calls of
  // kMost entries are long.
  std::pair<int64_t, int64_t> of_any_batch() {
    constexpr int kMany = 1024, kMost = 1 << 24;
    const int64_t each = of_batch(kMany + 1) - of_batch(kMany);
    int64_t more = std::max(int64_t{0}, of_batch(kMost) - each * kMost);
    for (int batch = 1; batch <= kMany; ++batch) more = std::max(more, of_batch(batch) - each * batch);
    return {each, more};
  }
};

// A function of Python that returns files by name, for threads without the GIL.
std::function<std::map<std::string, std::string>(int)> unpacker(const nb::object& function) {
  // Kept for good: when the settings are destroyed there may be no interpreter to release it.
  const nb::handle kept = function.inc_ref();
  return [kept](int arch) {
    nb::gil_scoped_acquire acquire;
    std::map<std::string, std::string> files;
    try {
      for (auto [name, content] : nb::cast<nb::dict>(kept(arch))) {
        const nb::bytes bytes = nb::cast<nb::bytes>(content);
        files.emplace(nb::cast<std::string>(name), std::string(bytes.c_str(), bytes.size()));
      }
    } catch (const nb::python_error& error) {
      throw std::runtime_error(error.what());  // an error of Python may only be kept with the GIL
    }
    return files;
  };
}

nb::capsule capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

}  // namespace
}  // namespace jax_flash

NB_MODULE(_core, m) {
  using namespace jax_flash;
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  nb::list known;
  for (const auto& [api, record] : recording::kKnown) {
    known.append(nb::make_tuple(nb::make_tuple(api.major, api.minor), nb::make_tuple(record.major, record.minor)));
  }
  m.attr("RECORD_API_VERSIONS") = nb::tuple(known);

  nb::list operands;
#define JAX_FLASH_NOTHING(type, name)
#define JAX_FLASH_FEATURE(type, name, absent)
#define JAX_FLASH_NAME(type, name, dims) operands.append(nb::make_tuple(#name, dims));
  JAX_FLASH_OPTIONS(JAX_FLASH_NOTHING, JAX_FLASH_NOTHING, JAX_FLASH_FEATURE, JAX_FLASH_NAME, JAX_FLASH_NAME)
#undef JAX_FLASH_NAME
#undef JAX_FLASH_FEATURE
#undef JAX_FLASH_NOTHING
  m.attr("OPERANDS") = nb::tuple(operands);

  m.attr("CPU_OPERATIONS") = nb::cast(cpu::operation_names());

  nb::list float16_families;
  for (const std::string& family : cuda::float16_families()) float16_families.append(family);
  m.attr("FLOAT16_FAMILIES") = nb::tuple(float16_families);

  m.def(
      "handlers",
      [](bool records) {
        const Handlers of_calls = handlers();
        nb::dict cpu, cuda, forward, backward;
        cpu["jax_flash_forward"] = capsule(of_calls.forward_cpu);
        cpu["jax_flash_backward"] = capsule(of_calls.backward_cpu);
        forward["initialize"] = capsule(of_calls.prepare_forward_cuda);
        forward["execute"] = capsule(of_calls.forward_cuda);
        backward["initialize"] = capsule(of_calls.prepare_backward_cuda);
        backward["execute"] = capsule(of_calls.backward_cuda);
        cuda["jax_flash_forward"] = forward;
        if (records) {
          cuda.clear();
          cuda["jax_flash_register_forward"] = capsule(register_forward_cuda);
        }
        cuda["jax_flash_backward"] = backward;
        nb::dict scale;
        scale["initialize"] = capsule(scale_handlers().prepare);
        scale["execute"] = capsule(scale_handlers().run);
        cuda["jax_flash_scale"] = scale;
        nb::dict study;
        study["initialize"] = capsule(study_handlers().prepare);
        study["execute"] = capsule(study_handlers().run);
        cuda["jax_flash_study"] = study;
        nb::dict all;
        all["cpu"] = cpu;
        all["CUDA"] = cuda;
        return all;
      },
      nb::kw_only(), nb::arg("records"));

  m.def(
      "scratch",
      [](const std::string& pass, const std::string& platform, const std::string& dtype, const nb::dict& options,
         int batch, int q_length, int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim,
         const nb::dict& shapes, const std::vector<int64_t>& dcaptured_elements) -> int64_t {
        return Scratch(pass, platform, dtype, options, q_length, kv_length, q_heads, kv_heads, head_dim, value_head_dim,
                       shapes, dcaptured_elements)
            .of_batch(batch);
      },
      nb::kw_only(), nb::arg("pass_"), nb::arg("platform"), nb::arg("dtype"), nb::arg("options"), nb::arg("batch"),
      nb::arg("q_length"), nb::arg("kv_length"), nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
      nb::arg("value_head_dim"), nb::arg("shapes"), nb::arg("dcaptured_elements") = std::vector<int64_t>{});

  m.def(
      "begin_to_load",
      [](const std::string& pass, const std::string& dtype, const nb::dict& options, int batch, int q_length,
         int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim, const nb::dict& shapes,
         int64_t scratch) {
        Scratch described(pass, "cuda", dtype, options, q_length, kv_length, q_heads, kv_heads, head_dim,
                          value_head_dim, shapes, {});
        described.problem.batch = batch;
        described.problem.dbias_strides = described.problem.bias_strides;
        nb::gil_scoped_release release;  // a thread that waits for the GIL may hold a lock that this takes
        cuda::begin_to_load(described.pass, described.dtype, described.problem, scratch);
      },
      nb::kw_only(), nb::arg("pass_"), nb::arg("dtype"), nb::arg("options"), nb::arg("batch"), nb::arg("q_length"),
      nb::arg("kv_length"), nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_head_dim"),
      nb::arg("shapes"), nb::arg("scratch"));
  m.def("finish_loading", &cuda::finish_loading, nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "scratch_of_any_batch",
      [](const std::string& pass, const std::string& platform, const std::string& dtype, const nb::dict& options,
         int q_length, int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim,
         const nb::dict& shapes, const std::vector<int64_t>& dcaptured_elements) {
        return Scratch(pass, platform, dtype, options, q_length, kv_length, q_heads, kv_heads, head_dim, value_head_dim,
                       shapes, dcaptured_elements)
            .of_any_batch();
      },
      nb::kw_only(), nb::arg("pass_"), nb::arg("platform"), nb::arg("dtype"), nb::arg("options"), nb::arg("q_length"),
      nb::arg("kv_length"), nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_head_dim"),
      nb::arg("shapes"), nb::arg("dcaptured_elements") = std::vector<int64_t>{});

  m.def(
      "plan_split_kv",
      [](int batch, int q_length, int kv_length, int q_heads, int kv_heads, const nb::dict& options) {
        Problem p = shape_of(named_options(options), batch, q_length, kv_length, q_heads, kv_heads);
        const cuda::SplitKvPlan plan = cuda::plan_split_kv(p);
        return std::make_pair(plan.rows, plan.slices);
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("q_length"), nb::arg("kv_length"), nb::arg("q_heads"),
      nb::arg("kv_heads"), nb::arg("options"));

  m.def(
      "is_single_tile",
      [](int batch, int q_length, int kv_length, int q_heads, int kv_heads) {
        return cuda::is_single_tile(shape_of(named_options({}), batch, q_length, kv_length, q_heads, kv_heads));
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("q_length"), nb::arg("kv_length"), nb::arg("q_heads"),
      nb::arg("kv_heads"));

  m.def(
      "group_splits",
      [](int batch, int q_length, int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim,
         const nb::dict& options) {
        Problem p = shape_of(named_options(options), batch, q_length, kv_length, q_heads, kv_heads);
        p.head_dim = head_dim;
        p.value_head_dim = value_head_dim;
        return cuda::group_splits(p);
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("q_length"), nb::arg("kv_length"), nb::arg("q_heads"),
      nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("value_head_dim"), nb::arg("options"));

  m.def("cpu_isa", &cpu::isa);

  m.def(
      "configure_cuda",
      [](std::string source_dir, std::vector<std::string> prebuilt_dirs, std::vector<std::string> nvrtc_paths,
         const nb::object& packed) {
        cuda::Settings settings{std::move(source_dir), std::move(prebuilt_dirs), std::move(nvrtc_paths), {}};
        if (!packed.is_none()) settings.packed = unpacker(packed);
        // Without the GIL: a thread that waits for it may hold a lock that this takes.
        nb::gil_scoped_release release;
        cuda::configure(std::move(settings));
      },
      nb::kw_only(), nb::arg("source_dir"), nb::arg("prebuilt_dirs"), nb::arg("nvrtc_paths"),
      nb::arg("packed") = nb::none());

  m.def("largest_head_dim", &cuda::largest_head_dim, nb::kw_only(), nb::arg("arch"), nb::arg("highest_precision"));

  auto ask = [&m](const char* name, bool (*answer)(int, Pass, const Problem&)) {
    m.def(
        name,
        [answer](int arch, const std::string& pass, const std::string& dtype, const nb::dict& options, int batch,
                 int q_length, int kv_length, int q_heads, int kv_heads, int head_dim, int value_head_dim,
                 const nb::dict& shapes) {
          Scratch described(pass, "cuda", dtype, options, q_length, kv_length, q_heads, kv_heads, head_dim,
                            value_head_dim, shapes, {});
          described.problem.batch = batch;
          return answer(arch, described.pass, described.problem);
        },
        nb::kw_only(), nb::arg("arch"), nb::arg("pass_"), nb::arg("dtype"), nb::arg("options"), nb::arg("batch"),
        nb::arg("q_length"), nb::arg("kv_length"), nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
        nb::arg("value_head_dim"), nb::arg("shapes"));
  };
  ask("lists_keys", cuda::lists_keys);
  ask("orders_dq", [](int arch, Pass, const Problem& problem) { return cuda::orders_dq(arch, problem); });

  m.def("separate_dq", &cuda::separate_dq, nb::kw_only(), nb::arg("arch"), nb::arg("largest_head_dim"));

  m.def("cuda_launches", [] {
    const cuda::Launches launches = cuda::launches();
    return nb::make_tuple(launches.all, launches.captured, launches.recorded);
  });

  m.def("cuda_status", [] {
    cuda::Status s = cuda::status();
    nb::list devices;
    for (const cuda::Device& d : s.devices) {
      nb::dict device;
      device["name"] = d.name;
      device["compute_capability"] = d.compute_capability;
      device["family"] = d.family;
      devices.append(device);
    }
    nb::dict out;
    out["driver"] = s.driver;
    out["driver_error"] = s.driver_error;
    out["nvrtc"] = s.nvrtc;
    out["nvrtc_error"] = s.nvrtc_error;
    out["cache_dir"] = s.cache_dir;
    out["cache_problem"] = s.cache_problem;
    out["devices"] = devices;
    return out;
  });

  m.def(
      "build_kernels",
      [](int arch, const std::string& out_dir, const std::vector<std::string>& dtypes,
         const std::vector<std::pair<int, int>>& head_dims, const std::vector<nb::dict>& options,
         const std::string& family, const std::vector<std::string>& passes) {
        const cuda::Variants wanted = named_variants(dtypes, head_dims, options, passes);
        std::vector<cuda::Kernel> kernels;
        {
          nb::gil_scoped_release release;
          kernels = cuda::build(arch, wanted, out_dir, family);
        }
        nb::list rows;
        for (const cuda::Kernel& k : kernels) rows.append(row_of(k));
        return rows;
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("out_dir"), nb::arg("dtypes"), nb::arg("head_dims"), nb::arg("options"),
      nb::arg("family") = "", nb::arg("passes") = kPasses);

  m.def(
      "kernel_names",
      [](int arch, const std::vector<std::string>& dtypes, const std::vector<std::pair<int, int>>& head_dims,
         const std::vector<nb::dict>& options, const std::vector<std::string>& passes) {
        nb::list names;
        for (const std::string& name : cuda::names(arch, named_variants(dtypes, head_dims, options, passes))) {
          names.append(name);
        }
        return names;
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("dtypes"), nb::arg("head_dims"), nb::arg("options"),
      nb::arg("passes") = kPasses);

  m.def(
      "fetch_kernels",
      [](int arch, const std::vector<std::string>& dtypes, const std::vector<std::pair<int, int>>& head_dims,
         const std::vector<nb::dict>& options, const std::string& gpu, const std::vector<std::string>& passes) {
        const cuda::Variants wanted = named_variants(dtypes, head_dims, options, passes);
        std::vector<cuda::Origin> origins;
        {
          nb::gil_scoped_release release;
          origins = cuda::fetch(arch, wanted, gpu);
        }
        nb::list rows;
        for (const cuda::Origin& o : origins) rows.append(nb::make_tuple(o.name, o.origin, o.seconds));
        return rows;
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("dtypes"), nb::arg("head_dims"), nb::arg("options"), nb::arg("gpu") = "",
      nb::arg("passes") = kPasses);

  m.def(
      "study_shared_bytes",
      [](int arch, const std::string& file, const std::string& entry, const std::string& constants) {
        nb::gil_scoped_release release;
        return cuda::study_shared_bytes(arch, {file, entry, constants});
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("file"), nb::arg("entry"), nb::arg("constants"));

  m.def(
      "fetch_kernel",
      [](int arch, const std::string& pass, const std::string& dtype, int head_dim, int value_head_dim,
         const nb::dict& attributes, const std::string& gpu) {
        Options options = named_options(attributes);
        nb::gil_scoped_release release;
        return cuda::fetch(arch, named_pass(pass), named_dtype(dtype), head_dim, value_head_dim, options, gpu);
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("pass_"), nb::arg("dtype"), nb::arg("head_dim"),
      nb::arg("value_head_dim"), nb::arg("options"), nb::arg("gpu") = "");

  m.def("cache_path", &cuda::cache_path);
  m.def("cache_refusal", [] {
    const cuda::KernelFolder cache = cuda::KernelFolder::cache(false);
    return cache.refused() ? cache.problem() : "";
  });
  m.def("make_cache", [] {
    const cuda::KernelFolder cache = cuda::KernelFolder::cache(true);
    if (!cache.usable() && !cache.path().empty()) throw std::runtime_error(cache.problem());
  });
  m.def("clear_cache", [] {
    const cuda::KernelFolder cache = cuda::KernelFolder::cache(false);
    if (!cache.problem().empty()) throw std::runtime_error(cache.problem());
    const cuda::KernelFolder::Removed removed = cache.clear();
    return std::make_pair(removed.files, removed.bytes);
  });
  m.def("sources_key", &cuda::sources_key);
  nb::list fields;
#define JAX_FLASH_FIELD(field) fields.append(#field);
  JAX_FLASH_TILE_FIELDS(JAX_FLASH_FIELD)
#undef JAX_FLASH_FIELD
  m.attr("TILE_FIELDS") = nb::tuple(fields);

  m.def("tune", [](const std::vector<nb::dict>& rows) {
    std::vector<cuda::TunedRow> tuned;
    for (const nb::dict& row : rows) {
      tuned.push_back({nb::cast<std::string>(row["gpu"]), nb::cast<std::string>(row["family"]),
                       named_pass(nb::cast<std::string>(row["pass"])), nb::cast<int>(row["head_dim"]),
                       named_tile_row(row)});
    }
    cuda::tune(std::move(tuned));
  });

  m.def(
      "tile_row",
      [](int arch, const std::string& pass, int head_dim, const std::string& gpu, bool functions) {
        const cuda::Choice choice = cuda::choose(arch, named_pass(pass), head_dim, gpu, functions);
        nb::dict row, found;
#define JAX_FLASH_FIELD(field) row[#field] = choice.row.field;
        JAX_FLASH_TILE_FIELDS(JAX_FLASH_FIELD)
#undef JAX_FLASH_FIELD
        found["family"] = choice.family;
        found["row"] = row;
        found["tuned"] = choice.tuned;
        found["most_shared_bytes"] = choice.most_shared_bytes;
        return found;
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("pass_"), nb::arg("head_dim"), nb::arg("gpu") = "",
      nb::arg("functions") = false);

  m.def(
      "build_row",
      [](int arch, const std::string& pass, const std::string& dtype, int head_dim, const nb::dict& attributes,
         const nb::dict& row, const std::string& out_dir) {
        const Options options = named_options(attributes);
        const cuda::TileRow tile = named_tile_row(row);
        cuda::Kernel kernel;
        {
          nb::gil_scoped_release release;
          kernel = cuda::build_row(arch, named_pass(pass), named_dtype(dtype), head_dim, options, tile, out_dir);
        }
        return row_of(kernel);
      },
      nb::kw_only(), nb::arg("arch"), nb::arg("pass_"), nb::arg("dtype"), nb::arg("head_dim"), nb::arg("options"),
      nb::arg("row"), nb::arg("out_dir"));
}
