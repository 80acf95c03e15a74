"""Copies between a rank's device and the memory of its host, in the background.

Each direction has one engine that copies one tensor after the other, as GPUs do: on CUDA a stream of its own
and page-locked host memory; on a CPU, where device and host share a memory, a thread. A test limits the
thread's rate by the environment variable `SECC_HOST_COPY_BYTES_PER_S`, so that a computation can run ahead of
its copies as it does on a GPU.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

COPY_RATE_VARIABLE = "SECC_HOST_COPY_BYTES_PER_S"


class PendingCopy:
    """A copy that was started. `wait` makes this rank's computation wait for it; `synchronize` returns when
    the target has the values, whoever reads them."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        if isinstance(self._event, Future):
            self._event.result()
        else:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        if isinstance(self._event, Future):
            self._event.result()
        else:
            self._event.synchronize()


class CopyEngine:
    """Copies in one direction, in the order in which copies are started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rate = float(os.environ.get(COPY_RATE_VARIABLE, "inf"))
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._thread = None if self._is_cuda else ThreadPoolExecutor(1, "host-copies")

    def start(self, target: torch.Tensor, source: torch.Tensor) -> PendingCopy:
        """Starts to copy `source` into `target`, after what this rank has computed so far. Neither may be
        freed or written before the copy has been waited for."""
        if self._thread is not None:
            return PendingCopy(
                self._thread.submit(self._copy, target.detach(), source.detach()), self._device
            )
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
        return PendingCopy(self._stream.record_event(), self._device)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        start = time.perf_counter()
        with torch.no_grad():
            target.copy_(source)
        time.sleep(max(0.0, target.nbytes / self._rate - (time.perf_counter() - start)))


class HostCopies:
    """The two engines of a rank, and memory of its host that they copy from and to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_device, self.to_host = CopyEngine(device), CopyEngine(device)

    def empty_on_host(self, like: torch.Tensor) -> torch.Tensor:
        """Returns host memory for the values of `like`."""
        return torch.empty_like(
            like, device="cpu", requires_grad=False, pin_memory=self.device.type == "cuda"
        )

    def take_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `tensor` in host memory, at once."""
        return self.empty_on_host(tensor).copy_(tensor.detach())
