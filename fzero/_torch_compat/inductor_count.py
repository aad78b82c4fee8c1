"""inductor_count: the kernels and bytes of a graph by Inductor's own code for an H100, on a machine without one.

Inductor schedules and writes the code; nothing is compiled and nothing runs. It asks the device for its properties:
those of an H100 SXM stand here. Only in a process in which CUDA is for fake tensors alone (`fake_cuda`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fzero._torch_compat.compute import CODE
from fzero._torch_compat.inductor_choices import rows_in_registers
from fzero._torch_compat.trace import ONE_THREAD, FakeTensor, FakeTensorMode

_CUDA = torch.device("cuda", 0)
_H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32, gcnArchName="", uuid="",
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    total_memory=85_000_000_000, L2_cache_size=50 << 20, shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
)  # fmt: skip


class _CodeWritten(BaseException):
    """The code is written: that is all that was wanted."""


def inductor_count(gm: torch.fx.GraphModule, likes: Sequence[torch.Tensor]) -> tuple[int, int]:
    """(kernels, the bytes that they read and write) of a graph on inputs of these forms: what `inductor_code` says."""
    return inductor_code(gm, likes)[1:]


def inductor_code(gm: torch.fx.GraphModule, likes: Sequence[torch.Tensor]) -> tuple[str, int, int]:
    """(Inductor's code, its kernels, the bytes that they read and write) of a graph on inputs of these forms, with the
    options of `inductor_compile`. Raises what Inductor raises."""
    from torch._inductor import metrics, standalone_compile
    from torch._inductor.graph import GraphLowering  # 2.13.0

    found: list[tuple[str, int, int]] = []

    def stop(self: Any) -> None:
        code = self.codegen()[0].value
        found.append((code, metrics.generated_kernel_count, int(self.count_bytes()[0])))
        raise _CodeWritten

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    metrics.reset()
    options = {
        **CODE, "fx_graph_cache": False, "triton.autotune_at_compile_time": False,
        "joint_graph_constant_folding": False,
    }  # fmt: skip
    written = mock.patch.object(GraphLowering, "compile_to_module", stop)
    with an_h100(), ONE_THREAD, torch.no_grad(), rows_in_registers(), written:
        inputs: list[Any] = [
            FakeTensor(mode, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), _CUDA)
            for x in likes
        ]
        with contextlib.suppress(_CodeWritten):
            standalone_compile(gm, inputs, dynamic_shapes="from_example_inputs", options={"config_patches": options})
    return found[0]


@contextlib.contextmanager
def an_h100() -> Iterator[None]:
    """What torch and Triton ask of a device while Inductor writes code is that of an H100 (2.13.0, Triton 3.7.1)."""
    import torch._dynamo.device_interface as interfaces
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.utils._triton as triton_utils
    import triton
    from torch._inductor.fx_passes import joint_graph, post_grad

    def gives(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    asked: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": _H100,
            "get_device_capability": (9, 0), "get_device_name": _H100.name, "synchronize": None, "set_device": None,
            "_exchange_device": 0, "_maybe_exchange_device": 0, "set_rng_state": None,
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        },
        interfaces.CudaInterface.Worker: {"get_device_properties": _H100},
        interfaces.CudaInterface: {
            "get_compute_capability": 90, "is_available": True, "raise_if_triton_unavailable": None,
            "get_device_properties": _H100,
        },
        triton_utils: {"has_triton": True},
        fake_tensor: {"init_gpu_context": None},
        joint_graph: {"lazy_init": None},  # it would trace patterns on the device
        post_grad: {"lazy_init": None},
    }  # fmt: skip
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver())
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
            for owner, names in asked.items():
                for name, value in names.items():
                    found = staticmethod(gives(value)) if isinstance(owner, type) else gives(value)
                    stack.enter_context(mock.patch.object(owner, name, found))
            yield
    finally:
        triton.runtime.driver._active = before


class _Driver:
    """Triton's driver of an H100."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132})

    def get_current_target(self) -> Any:
        """sm_90."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The same."""
        return _CUDA

    def get_device_interface(self) -> Any:
        """torch's."""
        return torch.cuda

    def get_current_stream(self, _: int) -> int:
        """The default one."""
        return 0
