// What torch's C++ asks of CUDA while it runs what is above a kernel: a guard of the current device, and whether there
// is a device at all (autograd runs backward in a thread for each). A torch without CUDA answers neither, and one with
// CUDA says on a machine without a device that there is none. Loaded before torch, this answers both: fake tensors of
// "cuda" can then be traced, with their backward. No kernel runs.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
  std::string showConfig() const override { return ""; } // for torch.__config__.show(), which libraries read
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks); // before CUDA's own
struct Described : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; } // what "cuda" without a number is
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Described);
// The guard of a torch with CUDA comes after this one, and the last counts: so this is called once torch is there.
extern "C" void fzero_fake_cuda() {
  static Described guard;
  c10::impl::DeviceGuardImplRegistrar again(c10::DeviceType::CUDA, &guard);
}
