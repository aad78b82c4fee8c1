"""What Inductor's Triton kernels become on a GPU that is not there: registers, stack and vector loads of their cubins.

For a process of `fzero fake-cuda`. A kernel's source is found in the code of its graph, and run as Inductor would: that
gives the kernel with the configurations that it would try.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fzero._torch_compat.inductor_count import an_h100

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def cubins(code: str, capabilities: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What each kernel of a graph's code becomes, by configuration and capability."""
    with an_h100(), mock.patch.object(triton_helpers, "set_driver_to_gpu", return_value=None):
        for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''\n(.*?)'''", code, re.S):
            kernel = _run(name, source)
            tuned = {"kernel": name, "kind": kernel.heuristic_type.name, "configurations": len(kernel.configs)}
            for config in kernel.configs:
                for capability in capabilities:
                    yield {**tuned, "capability": capability, **_assembled(kernel, config, capability)}


def _run(name: str, source: str) -> Any:
    """The kernel that a source makes, which must lie in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        kernel.fn.src, kernel.fn.hash  # noqa: B018  (read while the file is there)
    return kernel


def _assembled(kernel: Any, config: Any, capability: int) -> dict[str, int]:
    names, meta = kernel.fn.arg_names, kernel.triton_meta
    constants = {**meta.get("constants", {}), **config.kwargs}
    source = ASTSource(
        fn=kernel.fn,
        signature={name: "constexpr" if name in constants else meta["signature"][name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs=dict(meta["configs"][0]),
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([str(TOOL), "-res-usage", file.name], capture_output=True, text=True)
    used = dict(re.findall(r"(REG|STACK):(\d+)", said.stdout + said.stderr))
    loads = re.findall(r"ld\.global\S*", made.asm["ptx"])
    wide = [load for load in loads if re.search(r"\.v\d", load)]
    return {"registers": int(used["REG"]), "stack": int(used["STACK"]), "loads": len(loads), "vectors": len(wide)}
