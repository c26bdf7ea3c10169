"""Rows of a stored matrix read from disk, so that no tensor has to be in memory as a whole.

Reads go into a buffer that is used again, not through a memory map: pages that a map has touched count as the process's
memory until the kernel reclaims them, five gigabytes for a shard of that size, and a failing disk kills the process
without a message.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.checkpoint.header import DTYPES, Entry
from qrl.errors import BadInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Rows:
    """A reader of the matrices of one checkpoint folder; use one per thread.

    Args:
        folder: of the weight files.
        device: of the tensors that `read` returns; a GPU is fed from pinned memory.
    """

    def __init__(self, folder: Path | str, device: str = "cpu") -> None:
        self.folder = Path(folder)
        self.device = device
        self._files: dict[str, int] = {}  # name → descriptor of what is open
        self._buffer: Tensor | None = None

    def read(self, entry: Entry, first: int, last: int) -> Tensor:
        """Return rows first to last - 1 of a matrix (O, I), in the stored dtype.

        On a CPU they are views of the reader's buffer, which the next call overwrites.

        Raises:
            BadInput: the file ends before the rows do, or cannot be read; or torch has no such dtype.
        """
        import torch

        dtype = self._dtype(entry)
        width = entry.shape[1]
        size = (last - first) * width * dtype.itemsize
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self.device != "cpu")
        raw = self._buffer[:size]
        self._fill(memoryview(raw.numpy()), entry.file, entry.start + first * width * dtype.itemsize)
        return raw.view(dtype).view(last - first, width).to(self.device)

    def whole(self, entry: Entry) -> Tensor:
        """Return a whole tensor of any shape, on the CPU, in memory of its own; errors as for `read`."""
        import torch

        tensor = torch.empty(entry.shape, dtype=self._dtype(entry))
        if tensor.numel():
            self._fill(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), entry.file, entry.start)
        return tensor

    def close(self) -> None:
        """Close the files; the reader cannot be used afterwards."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _dtype(self, entry: Entry) -> torch.dtype:
        import torch

        if entry.dtype not in DTYPES:
            raise BadInput(
                f"{self.folder / entry.file} holds a tensor of {entry.dtype}, which torch cannot read: expected one of "
                f"{', '.join(DTYPES)}."
            )
        return getattr(torch, DTYPES[entry.dtype])

    def _fill(self, view: memoryview, name: str, offset: int) -> None:
        try:
            if name not in self._files:
                self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            while view:
                count = os.preadv(self._files[name], [view], offset)
                if not count:
                    raise BadInput(
                        f"{self.folder / name} ends before its tensors do: it was cut while it was read; copy it again."
                    )
                view = view[count:]
                offset += count
        except OSError as error:
            raise BadInput(f"{self.folder / name} cannot be read: {error.strerror}.") from None
