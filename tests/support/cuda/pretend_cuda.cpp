// A CUDA device that does nothing, for a CPU build of torch: autograd, fake tensors and process groups find one device.
// Its memory cannot be touched; only fake tensors may be "on" it. Compiled and loaded by library.py.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace meshwright {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);

// The registry of torch looks its hooks up by this class name.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
};

static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());

}  // namespace meshwright
