// A pretended CUDA device for a CPU build of torch, in main memory, behind the real CUDA dispatch key.
//
// Every operator runs its CPU kernel on aliases of the same memory, once the devices of its arguments were checked as CUDA's
// wrappers check them. Fresh memory holds NaN. Python calls the functions at the end by ctypes. Headers of single operators, and no pybind11, take half of the time to build away.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <sstream>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceType;
using Names = std::unordered_set<std::string>;

const Device kDevice(DeviceType::CUDA, 0);
const c10::DispatchKeySet kCuda(c10::DispatchKey::CUDA);
std::atomic<int64_t> used{0}, peak{0}, kernels{0};
Names checked;    // operators that accept no CPU scalar beside CUDA tensors
Names kernelless; // operators without a CUDA kernel

// ---- memory, guard, generator, hooks

void use(int64_t bytes) {
  const auto now = used += bytes;
  for (auto most = peak.load(); now > most && !peak.compare_exchange_weak(most, now);) {
  }
}

struct Owned {  // memory of the device: its own, or that of a result that a CPU kernel made
  void* memory;
  c10::Storage storage;
  int64_t bytes;
};

void release(void* context) {
  auto* owned = static_cast<Owned*>(context);
  use(-owned->bytes);
  free(owned->memory);
  delete owned;
}

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes) {
      TORCH_CHECK(!posix_memalign(&memory, 512, (bytes + 511) / 512 * 512), "CUDA out of memory (pretended)");
      memset(memory, 0xFF, bytes);  // NaN in every floating-point type
    }
    use(bytes);
    return {memory, new Owned{memory, {}, static_cast<int64_t>(bytes)}, &release, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
Allocator allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(DeviceType) {}
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override { return stream(); }
  c10::Stream getDefaultStream(Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  c10::Stream getNewStream(Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Generator final : c10::GeneratorImpl {
  Generator() : c10::GeneratorImpl(kDevice, kCuda), inner(at::detail::createCPUGenerator(4242)) {}
  void set_current_seed(uint64_t value) override { inner.set_current_seed(~value), last = value; }  // unlike the CPU's
  uint64_t current_seed() const override { return last; }
  uint64_t seed() override { return last = inner.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    inner.set_state(Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state))));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.get_state().getIntrusivePtr(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator();
    copy->inner = inner.clone();
    copy->last = last;
    return copy;
  }
  at::Generator inner;
  uint64_t last = 0;
};

const at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<Generator>();
  return generator;
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void*) const override { return false; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuSOLVER() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

// ---- tensors of the device as the CPU's, and back

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }

std::string described(const Tensor& tensor) {
  std::string text = std::string(c10::toString(tensor.scalar_type())) + (on_device(tensor) ? "@cuda[" : "@cpu[");
  for (auto size : tensor.sizes()) text += std::to_string(size) + ",";
  return text + "] ";
}

Tensor shaped(c10::Storage storage, c10::DispatchKey key, const Tensor& as) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), as.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(as.sizes(), as.strides(), as.storage_offset());
  if (as.is_conj()) tensor._set_conj(true);
  if (as.is_neg()) tensor._set_neg(true);
  if (as.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

class Aliases {  // of the tensors of one call, with which tensors share memory kept as it is
 public:
  Tensor cpu(const Tensor& tensor) {
    auto storage = tensor.storage();
    auto& alias = to_cpu_[storage.unsafeGetStorageImpl()];
    if (!alias) {
      at::DataPtr memory(storage.mutable_data(), Device(DeviceType::CPU));
      alias = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), nullptr, false);
      originals_.emplace(alias.unsafeGetStorageImpl(), storage);
    }
    return shaped(alias, c10::DispatchKey::CPU, tensor);
  }
  Tensor device(const Tensor& result) {  // a view of an argument, or a new tensor, whose memory is taken over
    if (!result.defined() || !result.device().is_cpu()) return result;
    auto storage = result.storage();
    if (auto original = originals_.find(storage.unsafeGetStorageImpl()); original != originals_.end())
      return shaped(original->second, c10::DispatchKey::CUDA, result);
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    use(bytes);
    at::DataPtr memory(storage.mutable_data(), new Owned{nullptr, storage, bytes}, &release, kDevice);
    return shaped({c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), &allocator, true},
                  c10::DispatchKey::CUDA, result);
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_cpu_, originals_;
};

Tensor cpu(const Tensor& tensor) { return on_device(tensor) ? Aliases().cpu(tensor) : tensor; }
Tensor device(const Tensor& tensor) { return Aliases().device(tensor); }

// ---- every operator without a kernel of its own below

const Names kIndexing = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put",
                         "aten::_unsafe_index.Tensor"};
const Names kProducts = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot",
                         "aten::addmm_", "aten::addmv_", "aten::baddbmm_", "aten::addbmm", "aten::vdot"};
const Names kWideProducts = {"aten::mm.dtype", "aten::bmm.dtype", "aten::addmm.dtype", "aten::baddbmm.dtype"};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), begin_(stack->size() - schema_.arguments().size()) {
    const auto& full = schema_.operator_name();
    name_ = full.overload_name.empty() ? full.name : full.name + "." + full.overload_name;
  }

  void run() {
    TORCH_CHECK(!kernelless.count(name_), "Could not run '", name_, "' with arguments from the 'CUDA' backend");
    for (size_t i = 0; i < schema_.arguments().size(); i++) replace(stack_[begin_ + i], schema_.arguments()[i]);
    kIndexing.count(name_) ? check_indices() : check_devices();
    check_types();
    kernels++;
    if (kWideProducts.count(name_)) return wide_product();
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    write_outs();
    for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); i++) give_back(stack_[i]);
  }

 private:
  struct Argument {
    Tensor original, alias;
    bool out, index;
  };

  Tensor note(const Tensor& tensor, bool out = false, bool index = false) {
    if (!tensor.defined()) return tensor;
    text_ += described(tensor);
    Tensor alias = tensor;
    if (on_device(tensor))
      alias = out ? Tensor(at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type()))
                  : aliases_.cpu(tensor);
    arguments_.push_back({tensor, alias, out, index});
    return alias;
  }

  void replace(c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      value = note(value.toTensor(), argument.is_out());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(note(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(note(*tensor, false, true)) : tensor);
      value = list;
    } else if (value.isDevice()) {
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator() || argument.type()->str().find("Generator") != std::string::npos) {
      const auto generator = value.isGenerator() ? value.toGenerator() : default_generator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu' (", name_, ")");
      value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
    }
  }

  void check_devices() {
    const bool any = std::any_of(arguments_.begin(), arguments_.end(), [](auto& it) { return on_device(it.original); });
    for (const auto& argument : arguments_)
      TORCH_CHECK(!any || on_device(argument.original) || (argument.original.dim() == 0 && !checked.count(name_)),
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name_,
                  ") ", text_);
  }

  void check_indices() {
    const auto& self = arguments_[0].original;
    for (size_t i = 1; i < arguments_.size(); i++) {
      const auto& tensor = arguments_[i].original;
      const bool index = arguments_[i].index;
      TORCH_CHECK(tensor.device() == self.device() || (tensor.device().is_cpu() && (index || tensor.dim() == 0)),
                  "indices should be either on cpu or on the same device as the indexed tensor (", name_, ") ", text_);
    }
  }

  void check_types() {
    if (arguments_.empty() || !on_device(arguments_[0].original)) return;
    const auto type = arguments_[0].original.scalar_type();
    if (kProducts.count(schema_.name()))
      TORCH_CHECK((at::isFloatingType(type) || at::isComplexType(type)) && !at::isFloat8Type(type),
                  "\"addmm_cuda\" not implemented for '", c10::toString(type), "' (", name_, ") ", text_);
    const bool elementwise = name_.find("vector_norm") + 1 || name_.find("vecdot") + 1 || name_.find("cross") + 1;
    if (schema_.name().rfind("aten::linalg_", 0) == 0 && !elementwise)
      TORCH_CHECK(type == at::kFloat || type == at::kDouble || at::isComplexType(type),
                  "linalg: Low precision dtypes not supported. Got ", c10::toString(type), " (", name_, ")");
  }

  void wide_product() {  // only CUDA has these, for 16-bit factors
    const auto narrow = arguments_.back().original.scalar_type();
    TORCH_CHECK(narrow == at::kHalf || narrow == at::kBFloat16, "out_dtype is for 16-bit inputs (", name_, ")");
    at::AutoDispatchBelowADInplaceOrView guard;
    std::vector<Tensor> wide;
    for (const auto& argument : arguments_) wide.push_back(argument.alias.to(at::kFloat));
    auto product = at::_ops::matmul::call(wide[wide.size() - 2], wide.back());
    stack_.resize(begin_);
    stack_.push_back(device(wide.size() == 2 ? product : at::_ops::add_Tensor::call(product, wide[0], 1)));
  }

  void write_outs() {
    at::AutoDispatchBelowADInplaceOrView guard;
    for (auto& argument : arguments_) {
      if (!argument.out || !on_device(argument.original)) continue;
      if (argument.alias.sizes() != argument.original.sizes())
        at::native::resize_(argument.original, argument.alias.sizes(), std::nullopt);
      cpu(argument.original).copy_(argument.alias);
    }
  }

  void give_back(c10::IValue& value) {
    if (value.isTensor()) {
      value = original(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(original(tensor));
      value = list;
    }
  }

  Tensor original(const Tensor& result) {
    for (const auto& argument : arguments_)
      if (result.is_same(argument.alias)) return argument.original;
    return aliases_.device(result);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t begin_;
  std::string name_, text_;
  std::vector<Argument> arguments_;
  Aliases aliases_;
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// ---- operators that make memory, move it or look at it otherwise

using Sizes = at::IntArrayRef;

Tensor empty(Sizes sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<Device>,
             std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(sizes, &allocator, kCuda, c10::dtype_or_default(type), format);
}

Tensor empty_strided(Sizes sizes, Sizes strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator, kCuda, c10::dtype_or_default(type));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  if (self.is_same(source)) return self;
  if (on_device(self) && on_device(source)) kernels++;
  at::AutoDispatchBelowADInplaceOrView guard;
  Aliases aliases;
  auto to = on_device(self) ? aliases.cpu(self) : self;
  to.copy_(on_device(source) ? aliases.cpu(source) : source);
  return self;
}

at::Scalar item(const Tensor& self) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::_ops::_local_scalar_dense::call(cpu(self));
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, Sizes sizes, Sizes strides) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, sizes, strides);
}
Tensor& set_source(Tensor& self, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {count}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_storage(self, {c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true}, 0, {0}, {});
}

// ---- what torch chooses by a table of the device type, not by the dispatcher

int64_t attention(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double, bool,
                  std::optional<double>, bool) {
  TORCH_CHECK(!mask || !mask->defined() || on_device(*mask), "Expected attn_mask on ", query.device().str());
  return 0;  // by products and softmax
}

using SymSizes = c10::SymIntArrayRef;
const c10::SymInt kNoPadding[] = {0, 0};

Tensor depthwise(const Tensor& x, const Tensor& weight, SymSizes, const std::optional<Tensor>& bias, SymSizes stride,
                 SymSizes padding, SymSizes dilation) {
  kernels++;
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto b = bias && bias->defined() ? std::optional<Tensor>(cpu(*bias)) : std::nullopt;
  return device(
      at::_ops::convolution::call(cpu(x), cpu(weight), b, stride, padding, dilation, false, kNoPadding, x.size(1)));
}

std::tuple<Tensor, Tensor> depthwise_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, Sizes, Sizes stride,
                                              Sizes padding, Sizes dilation, std::array<bool, 2> which) {
  kernels++;
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto symbols = [](Sizes sizes) { return c10::fromIntArrayRefSlow(sizes); };
  const auto result = at::_ops::convolution_backward::call(cpu(grad), cpu(x), cpu(weight), std::nullopt, symbols(stride),
                                                           symbols(padding), symbols(dilation), false, kNoPadding,
                                                           weight.size(0), {which[0], which[1], false});
  return {device(std::get<0>(result)), device(std::get<1>(result))};
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_local_scalar_dense", TORCH_FN(item));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Storage", TORCH_FN(set_source));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_", TORCH_FN(set_nothing));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("resize_", TORCH_FN(at::native::resize_));
  library.impl("_conv_depthwise2d", TORCH_FN(depthwise));
}

Names split(const char* words) {
  std::istringstream text(words);
  return {std::istream_iterator<std::string>(text), {}};
}
}  // namespace

extern "C" {
void begin(const char* all_on_device, const char* without_kernel) {
  checked = split(all_on_device), kernelless = split(without_kernel);
  c10::SetAllocator(DeviceType::CUDA, &allocator, 1);
  // torch keeps the hooks that it got while it was imported, a stub; the stub's functions become ours.
  auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  static auto* ours = new Hooks();
  if (!hooks.hasCUDA()) *reinterpret_cast<void**>(&hooks) = *reinterpret_cast<void**>(ours);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention);
  at::native::conv_depthwise2d_backward_stub.set_cuda_dispatch_ptr(&depthwise_backward);
}
int64_t memory_used() { return used; }
int64_t most_memory_used() { return peak; }
int64_t kernels_launched() { return kernels; }
void forget_peak() { peak = used.load(); }
PyObject* generator() { return THPGenerator_Wrap(default_generator()); }
}
