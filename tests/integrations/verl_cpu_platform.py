"""A platform that lets verl train on a CPU, for tests: verl itself knows only accelerators. Ray is told of a GPU that nobody
uses. `VERL_USE_EXTERNAL_MODULES=verl_cpu_platform VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda` switches it on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*args: Any) -> None:
    return None


def _zero(*args: Any) -> int:
    return 0


for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(torch.cpu, _name, _zero)
for _name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
    setattr(torch.cpu, _name, _nothing)
torch.cpu.mem_get_info = lambda *args: (1 << 30, 1 << 30)
torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state

_init_process_group = torch.distributed.init_process_group


def _init_with_gloo(backend: str | None = None, **options: Any) -> None:
    """verl names a backend for the CPU and one for its device, which must not be the same one twice."""
    _init_process_group(backend=backend and "cpu:gloo", **options)


torch.distributed.init_process_group = _init_with_gloo


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = torch.cpu
    current_device = lambda self: "cpu"  # noqa: E731
    device_count = lambda self: 1  # noqa: E731
    is_available = lambda self: True  # noqa: E731
    is_platform_available = lambda self, use_smi_check=False: True  # noqa: E731
    is_ipc_supported = lambda self: False  # noqa: E731
    set_device = synchronize = empty_cache = set_allocator_settings = profiler_start = profiler_stop = cudart = _nothing
    manual_seed = manual_seed_all = lambda self, seed: torch.manual_seed(seed)
    get_device_capability = lambda self, index=0: (None, None)  # noqa: E731
    communication_backend_name = lambda self: "gloo"  # noqa: E731
    visible_devices_envvar = lambda self: "CUDA_VISIBLE_DEVICES"  # noqa: E731
    ray_resource_name = lambda self: "GPU"  # noqa: E731
    ray_resource_options = lambda self, count: {"num_gpus": count}  # noqa: E731
    ray_noset_envvars = lambda self: []  # noqa: E731
    rollout_env_vars = lambda self: {}  # noqa: E731

    @contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield
