// A simulated CUDA device for PyTorch builds that have none: "cuda:0" and "cuda:1" whose memory is the host's.
//
// Loaded into a CPU-only PyTorch (`simulated_gpu.enable()` does it), so that a program that says device="cuda" runs its
// own code path for a GPU, and fails where a real one would: tensors of two devices in one operation, generators of the
// wrong device, `.numpy()` on a device tensor. Backward passes run in the device's own autograd thread, as they do on a
// GPU. Kernels launched, host synchronisations and copies between host and device are counted.
//
// How: an allocator, a device guard, CUDA's hooks, and under the dispatch key CUDA a few operations of its own (memory,
// views, copies) and one boxed fallback for all others, which first judges devices as PyTorch's generated CUDA wrappers
// and TensorIterator do, then has the CPU's kernel work on the same memory. Nothing is copied for that.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr auto kSimulated = c10::DeviceType::CUDA;
constexpr int kDevices = 2;

// what is counted ------------------------------------------------------------------------------------------------------

struct Counts {
  std::atomic<int64_t> kernels{0}, syncs{0}, h2d{0}, h2d_bytes{0}, d2h{0}, d2h_bytes{0};
};
Counts counts;
std::atomic<bool> waits_are_errors{false};

void count_wait() {
  TORCH_CHECK(!waits_are_errors, "called a synchronizing CUDA operation");
  ++counts.syncs;
}

// memory ---------------------------------------------------------------------------------------------------------------

thread_local c10::DeviceIndex current = 0;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    if (size) {
      TORCH_CHECK(posix_memalign(&data, 512, size) == 0, "out of memory");
      std::memset(data, 0xFF, size);  // a GPU's fresh memory is no zeros: here floats are NaN
    }
    return {data, data, &Memory::release, c10::Device(kSimulated, current)};
  }
  static void release(void* context) { std::free(context); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(kSimulated, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSimulated; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = current;
    setDevice(device);
    return {kSimulated, before};
  }
  c10::Device getDevice() const override { return {kSimulated, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, at(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

 private:
  static c10::Device at(c10::Device device) {
    return {kSimulated, device.index() < 0 ? current : device.index()};
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// random numbers: a generator of the device, drawing as a CPU's of its own ----------------------------------------------

struct Draws final : c10::GeneratorImpl {
  explicit Draws(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kSimulated, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  at::Generator host;

 private:
  Draws* clone_impl() const override {
    auto* other = new Draws(device_.index());
    other->host.set_state(host.get_state());
    return other;
  }
};

at::Generator& own_draws(c10::DeviceIndex index) {
  static std::array<at::Generator, kDevices> each = [] {
    std::array<at::Generator, kDevices> made;
    for (int i = 0; i < kDevices; ++i) made[i] = at::make_generator<Draws>(static_cast<c10::DeviceIndex>(i));
    return made;
  }();
  return each.at(index < 0 ? current : index);
}

at::Generator host_draws(const at::Generator& generator) {
  return static_cast<Draws*>(generator.unsafeGetGeneratorImpl())->host;
}

// the same memory, seen from the host and from the device ---------------------------------------------------------------

void release_storage(void* context) { delete static_cast<c10::Storage*>(context); }

at::Tensor seen(const c10::Storage& storage, const at::Tensor& like, c10::Device device, c10::Allocator* allocator) {
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), &release_storage, device);
  c10::Storage view(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
  auto key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(view), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided, "the simulated device has dense tensors only");
  return seen(tensor.storage(), tensor, at::kCPU, c10::GetAllocator(c10::kCPU));
}

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided) return tensor;
  return seen(tensor.storage(), tensor, device, &memory);
}

// which devices may meet ------------------------------------------------------------------------------------------------

bool takes_host_indices(const std::string& name) {
  return name.rfind("aten::index.", 0) == 0 || name.rfind("aten::index_put", 0) == 0 ||
      name.rfind("aten::_index_put_impl_", 0) == 0 || name.rfind("aten::_unsafe_index", 0) == 0;
}

const std::unordered_set<std::string>& synchronising() {
  static const std::unordered_set<std::string> names = {
      "aten::equal", "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out",
      "aten::_unique2", "aten::_unique", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
      "aten::bincount", "aten::repeat_interleave.Tensor", "aten::_linalg_eigh", "aten::_linalg_eigh.eigenvalues",
      "aten::_linalg_svd", "aten::_linalg_svd.U", "aten::linalg_eig", "aten::multinomial"};
  return names;
}

struct Argument {
  at::Tensor tensor;
  std::string name;
  bool written;
};

c10::Device judged(const std::string& name, const std::vector<Argument>& arguments, c10::Device fallback) {
  std::optional<c10::Device> device;
  for (const auto& one : arguments)
    if (one.tensor.defined() && !one.tensor.device().is_cpu()) {
      device = one.tensor.device();
      break;
    }
  if (!device) return fallback;
  const bool indexes = takes_host_indices(name);
  for (const auto& one : arguments) {
    if (!one.tensor.defined() || one.tensor.device() == *device) continue;
    const bool host = one.tensor.device().is_cpu();
    if (indexes && one.name == "indices" && host) {
      ++counts.h2d;
      counts.h2d_bytes += static_cast<int64_t>(one.tensor.nbytes());
      continue;
    }
    TORCH_CHECK(
        !(indexes && one.name == "self" && host), "indices should be either on cpu or on the same device as the indexed "
        "tensor (cpu) [", name, "]");
    if (host && one.tensor.dim() == 0 && !one.written) continue;  // a number, which most operations take
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
        one.tensor.device(), "! (argument ", one.name, " of ", name, ")");
  }
  return *device;
}

// all operations that the device has no kernel of its own for ------------------------------------------------------------

struct Form {  // of an operation
  std::string name;
  int generator = -1;  // which argument; -1: none
  bool draws = false;  // from the global generator, being handed none
};

const Form& form_of(const c10::OperatorHandle& op) {
  static std::mutex lock;
  static std::unordered_map<c10::OperatorName, Form> known;
  std::lock_guard<std::mutex> guard(lock);
  auto found = known.find(op.operator_name());
  if (found != known.end()) return found->second;
  Form form;
  const auto& schema = op.schema();
  form.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) form.generator = static_cast<int>(i);
  form.draws = form.generator < 0 && op.hasTag(at::Tag::nondeterministic_seeded);
  return known.emplace(op.operator_name(), form).first->second;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const Form& form = form_of(op);
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;

  std::vector<Argument> arguments;
  c10::Device named(kSimulated, current);
  for (size_t i = 0; i < count; ++i) {
    const auto& value = (*stack)[begin + i];
    const auto& about = schema.arguments()[i];
    const bool written = about.alias_info() && about.alias_info()->isWrite();
    if (value.isTensor()) {
      arguments.push_back({value.toTensor(), about.name(), written});
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) arguments.push_back({t, about.name(), written});
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
        if (t.has_value()) arguments.push_back({*t, about.name(), written});
    } else if (value.isDevice() && value.toDevice().type() == kSimulated) {
      named = value.toDevice();
      if (!named.has_index()) named = c10::Device(kSimulated, current);
    }
  }
  const c10::Device device = judged(form.name, arguments, named);

  ++counts.kernels;
  bool waits = synchronising().count(form.name) > 0;
  if (takes_host_indices(form.name))
    for (const auto& one : arguments)
      waits = waits || (one.name == "indices" && one.tensor.defined() && one.tensor.scalar_type() == at::kBool);
  if (waits) count_wait();

  // the same memory as the host sees it
  std::unordered_map<const c10::TensorImpl*, at::Tensor> originals;
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs;  // original, what was handed on
  auto hand_on = [&](const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || tensor.device().is_cpu()) return tensor;
    at::Tensor host = written && tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU))
                                                     : on_host(tensor);
    originals.emplace(host.unsafeGetTensorImpl(), tensor);
    if (written) outputs.emplace_back(tensor, host);
    return host;
  };
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    const auto& about = schema.arguments()[i];
    const bool written = about.alias_info() && about.alias_info()->isWrite();
    if (value.isTensor()) {
      value = hand_on(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(hand_on(t, written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
        list.push_back(t.has_value() ? std::optional<at::Tensor>(hand_on(*t, written)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (static_cast<int>(i) == form.generator) {
      if (value.isNone()) {
        value = host_draws(own_draws(device.index()));
      } else {
        auto given = value.toGenerator();
        TORCH_CHECK(
            given.device().type() == kSimulated, "Expected a 'cuda' device type for generator but found '",
            given.device().type(), "' [", form.name, "]");
        value = host_draws(given);
      }
    }
  }

  auto run = [&] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); };
  if (form.draws) {  // in the CPU's kernel from the CPU's global generator, which then is the device's for a while
    auto host = at::detail::getDefaultCPUGenerator();
    auto before = host.get_state();
    auto own = host_draws(own_draws(device.index()));
    host.set_state(own.get_state());
    run();
    own.set_state(host.get_state());
    host.set_state(before);
  } else {
    run();
  }

  for (auto& [original, host] : outputs)
    if (host.sizes() != original.sizes() || (original.numel() == 0 && host.numel() != 0)) {
      auto moved = on_device(host, device);
      auto* impl = original.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(moved.storage());
      impl->set_sizes_and_strides(moved.sizes(), moved.strides(), moved.storage_offset());
    }
  auto bring_back = [&](const at::Tensor& tensor) {
    auto found = tensor.defined() ? originals.find(tensor.unsafeGetTensorImpl()) : originals.end();
    return found != originals.end() ? found->second : on_device(tensor, device);
  };
  const size_t returned = schema.returns().size(), first = stack->size() - returned;
  for (size_t i = 0; i < returned; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = bring_back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(bring_back(t));
      value = list;
    }
  }
}

// operations of its own ---------------------------------------------------------------------------------------------------

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(c10::Device(kSimulated, current)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(c10::Device(kSimulated, current)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  const auto& storage = impl->storage();
  if (storage.nbytes() < needed) {
    c10::DeviceGuard guard(self.device());
    auto data = memory.allocate(needed);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(needed);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const auto bytes = static_cast<int64_t>(self.nbytes());
  const bool up = source.device().is_cpu(), down = self.device().is_cpu();
  if (up) {
    TORCH_CHECK(!waits_are_errors || non_blocking, "called a synchronizing CUDA operation");
    ++counts.h2d;
    counts.h2d_bytes += bytes;
  } else if (down) {
    ++counts.d2h;
    counts.d2h_bytes += bytes;
    if (!non_blocking) count_wait();
  } else {
    ++counts.kernels;
  }
  at::Tensor to = on_host(self);
  to.copy_(on_host(source));
  return self;
}

// many copies within the device as one kernel, as CUDA has it for tensors of one type
void foreach_copy_(at::TensorList self, at::TensorList source, bool non_blocking) {
  bool together = true;
  for (size_t i = 0; i < self.size(); ++i)
    together = together && self[i].device() == source[i].device() && self[i].scalar_type() == source[i].scalar_type();
  if (!together) {
    for (size_t i = 0; i < self.size(); ++i) self[i].copy_(source[i], non_blocking);
    return;
  }
  ++counts.kernels;
  for (size_t i = 0; i < self.size(); ++i) {
    on_host(self[i]).copy_(on_host(source[i]));
    self[i].unsafeGetTensorImpl()->bump_version();  // as CUDA's kernel does: nothing above it counts the change
  }
}

at::Scalar local_scalar(const at::Tensor& self) {
  count_wait();
  return at::_local_scalar_dense(on_host(self));
}

bool is_pinned(const at::Tensor& self, std::optional<at::Device>) { return false; }

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy_);
  m.impl("_foreach_copy_", foreach_copy_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("is_pinned", is_pinned);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  for (const char* whole : {"convolution", "convolution_backward"})  // else taken apart as without cuDNN
    m.impl(whole, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// for Python -----------------------------------------------------------------------------------------------------------

TORCH_LIBRARY(simulated_gpu, m) {
  m.def("counts() -> int[]", []() {
    return std::vector<int64_t>{counts.kernels, counts.syncs, counts.h2d, counts.h2d_bytes, counts.d2h,
                                counts.d2h_bytes};
  });
  m.def("refuse_waits(bool refuse) -> ()", [](bool refuse) { waits_are_errors = refuse; });
  m.def("set_device(int index) -> ()", [](int64_t index) { current = static_cast<c10::DeviceIndex>(index); });
  m.def("get_device() -> int", []() { return static_cast<int64_t>(current); });
  m.def("default_state(int index) -> Tensor", [](int64_t index) {
    return own_draws(static_cast<c10::DeviceIndex>(index)).get_state();
  });
  m.def("set_default_state(int index, Tensor state) -> ()", [](int64_t index, const at::Tensor& state) {
    own_draws(static_cast<c10::DeviceIndex>(index)).set_state(state);
  });
  m.def("seed_default(int index, int seed) -> ()", [](int64_t index, int64_t seed) {
    own_draws(static_cast<c10::DeviceIndex>(index)).set_current_seed(static_cast<uint64_t>(seed));
  });
}

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  CUDAHooks() = default;
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return own_draws(index); }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<Draws>(static_cast<c10::DeviceIndex>(index < 0 ? current : index));
  }
  Device getDeviceFromPtr(void*) const override { return {kSimulated, current}; }
  Allocator* getCUDADeviceAllocator() const override { return &memory; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void deviceSynchronize(DeviceIndex) const override {}
};

// PyTorch has asked for its hooks, and found none, before this library can be loaded. Neither its object nor this one
// holds any data, so that it becomes one of these by its table of functions.
static const bool hooked = [] {
  static_assert(sizeof(CUDAHooks) == sizeof(void*) && sizeof(CUDAHooksInterface) == sizeof(void*));
  static const CUDAHooks ours;
  std::memcpy(const_cast<void*>(static_cast<const void*>(&detail::getCUDAHooks())), &ours, sizeof(void*));
  return true;
}();

}  // namespace at
