"""On CPUs, the shared memory of a vLLM that has unregistered is given back.

LMCache 0.5.6 pins each mapping by a tensor over that same mapping, so that it never ends: every restart of vLLM
left its whole KV cache in the server. The pin is not needed: PyTorch's storage keeps the mapping until its last
view is gone. With GPUs, LMCache maps nothing here.
"""

from typing import Any

from lmcache.v1.platform.devices.cpu import shm


class _Unpinned(dict[int, Any]):
    """What LMCache keeps its pins in, but it keeps nothing."""

    def __setitem__(self, key: int, value: Any) -> None:
        pass


def give_back() -> None:
    """For every mapping that this process makes from now on."""
    shm._CPU_SHM_KEEP_ALIVE = _Unpinned()
