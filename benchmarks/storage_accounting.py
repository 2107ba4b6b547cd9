"""Counts the bytes of all live tensor storages of a process, and their peak by phase.

A dispatch mode in every thread sees each operator's inputs and outputs. Storages are held weakly; their sizes are read
again at every operator, since FSDP2 resizes storages in place. Tensors that no operator of a counted thread has seen
are found by a scan of Python's objects at the beginning and at the end of a phase.

Included is memory that a storage owns or wraps (`torch.frombuffer`); not included is memory of Python objects, of
libraries (gloo's sockets) and of files that are mapped. Two storages over the same memory count twice unless they begin
at the same address.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages:
    """The live storages of this process. Call `install` once, then `phase` before each phase."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._is_counting = False
        self.name = ""
        """The phase that is running."""
        self.peaks: dict[str, int] = {}
        """Largest number of live bytes, by phase."""
        self.starts: dict[str, int] = {}
        """Live bytes at the beginning of each phase."""

    def install(self) -> None:
        """Count in this thread, and in every thread that starts from now on."""
        plain_run, ledger = threading.Thread.run, self

        def run(thread: threading.Thread) -> None:
            with _Watch(ledger):
                plain_run(thread)

        threading.Thread.run = run  # type: ignore[method-assign]
        self._mode = _Watch(self)
        self._mode.__enter__()

    def phase(self, name: str, *, is_counted: bool = True) -> None:
        """End the phase that is running and begin another one; is_counted: False: count nothing until the next."""
        with self._lock:
            if self._is_counting:
                self._scan()
            self.name, self._is_counting = name, is_counted
            if is_counted:
                self._scan()
                self.starts[name] = self.live_bytes()

    def see(self, *trees: Any) -> None:
        """Add the storages of all tensors in `trees` and update the peak."""
        if not self._is_counting:
            return
        with self._lock:
            for leaf in tree_leaves(trees):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf)
            self._update_peak()

    def live_bytes(self) -> int:
        """Bytes of all live storages; those that begin at the same address are counted once."""
        sizes: dict[int, int] = {}
        for key, reference in list(self._live.items()):
            storage = reference()
            if storage is None:
                del self._live[key]
                continue
            num_bytes = storage.nbytes()
            if num_bytes:
                try:
                    address = storage.data_ptr()
                except RuntimeError:  # Python's object outlived the storage
                    del self._live[key]
                    continue
                sizes[address] = max(sizes.get(address, 0), num_bytes)
        return sum(sizes.values())

    def _update_peak(self) -> None:
        self.peaks[self.name] = max(self.peaks.get(self.name, 0), self.live_bytes())

    def _add(self, tensor: torch.Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has its storage in its local tensor
        if tensor.is_meta or tensor.layout != torch.strided:
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # fake tensors and other wrappers own no memory
            return
        if storage.device.type != "meta":
            self._live[storage._cdata] = weakref.ref(storage)

    def _scan(self) -> None:
        for found in gc.get_objects():
            if type(found) in (torch.Tensor, torch.nn.Parameter):
                self._add(found)
        self._update_peak()


class _Watch(TorchDispatchMode):
    """Reports every operator of one thread."""

    def __init__(self, ledger: LiveStorages) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._ledger.see(args, kwargs, result)
        return result
