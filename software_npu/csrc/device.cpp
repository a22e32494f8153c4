#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <deque>

#include "driver.h"
#include "memory.h"
#include "streams.h"

namespace software_npu {
namespace {

c10::Device device_at(int index) { return {kNPU, static_cast<c10::DeviceIndex>(index)}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kNPU;

  c10::DeviceType type() const override { return kNPU; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(snpu_device_count());
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < snpu_device_count()) set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_at(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(index_of(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return set_current_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    StreamState* state = find_state(stream);
    if (state && state->waits_for) return false;
    host_waits(clock_of(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_may_wait("synchronizing a stream", stream);
    host_waits(clock_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    check_may_wait("synchronizing a device");
    host_waits_for_all();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of npu:", static_cast<int>(device),
                " cannot be recorded on a stream of npu:", static_cast<int>(stream.device_index()));
    if (!*event) *event = new Event;
    Event& recorded = *static_cast<Event*>(*event);
    StreamState* state = find_state(stream);
    recorded = {std::chrono::steady_clock::now(), state ? state->capture : nullptr, stream.device_index(),
                clock_of(stream)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    wait_for_clock(stream, static_cast<Event*>(event)->clock);
    // A stream that waits for one that is captured is captured too.
    Graph* graph = static_cast<Event*>(event)->capture;
    if (is_captured(graph)) make_state(stream).capture = graph;
  }
  bool queryEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    TORCH_CHECK(!event || !is_captured(static_cast<Event*>(event)->capture),
                "synchronizing an event waits for the device: not permitted while a graph is captured");
    if (event) host_waits(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "both events must be recorded before the time between them is taken");
    const auto time = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(trace_of(data), stream);
  }

 private:
  static int index_of(c10::Device device) {
    const int index = device.has_index() ? device.index() : current_device();
    TORCH_CHECK(index < snpu_device_count(), "invalid device npu:", index, ": there are ", snpu_device_count());
    return index;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A generator of an NPU has one of the host inside, which kernels of the host can use. As on an NPU, an operator that
// draws adds 4 to the offset, and a lower offset takes draws back: the last ones, whose states are kept.
struct NPUGenerator final : c10::GeneratorImpl {
  NPUGenerator(int device, at::Generator inside)
      : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(inside)) {}

  at::Generator draw() {
    before.push_back(host.get_state());
    if (before.size() > kKeptDraws) before.pop_front();
    offset += kDraw;
    return host;
  }
  void forget_draws() {
    before.clear();
    offset = 0;
  }

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
    forget_draws();
  }
  void set_offset(uint64_t to) override {
    TORCH_CHECK(to % kDraw == 0 && to <= offset && (offset - to) / kDraw <= before.size(), "offset ", to,
                ": the software NPU goes back by whole draws, the last ", before.size(), " of ", offset / kDraw);
    for (; offset > to; offset -= kDraw) {
      host.set_state(before.back());
      before.pop_back();
    }
  }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override {
    forget_draws();
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
    forget_draws();
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  NPUGenerator* clone_impl() const override { return new NPUGenerator(device().index(), host.clone()); }

  static constexpr uint64_t kDraw = 4;
  static constexpr size_t kKeptDraws = 4;
  at::Generator host;
  std::deque<at::Tensor> before;  // states of the host's, before each of the last draws
  uint64_t offset = 0;
};

at::Generator new_generator(int device) {
  return at::make_generator<NPUGenerator>(device, at::detail::createCPUGenerator());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return snpu_device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(snpu_device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return device_at(current_device()); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(impl->device());
    c10::DataPtr fresh = device_allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, impl->nbytes());
    if (kept) std::memcpy(fresh.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};
Hooks hooks;

}  // namespace

at::Generator draw(const at::Generator& npu) { return npu.get<NPUGenerator>()->draw(); }

const at::Generator& default_generator(int device) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kMostDevices; ++index) made.push_back(new_generator(index));
    return made;
  }();
  TORCH_CHECK(device >= 0 && device < snpu_device_count(), "invalid device npu:", device);
  return generators[device];
}

void register_device() { at::RegisterPrivateUse1HooksInterface(&hooks); }

}  // namespace software_npu
