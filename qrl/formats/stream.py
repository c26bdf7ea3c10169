"""Rows of a stored matrix, read where they are needed: no tensor need ever lie in memory as a whole.

Plain reads into a buffer that is used again, not a memory map: what a map has touched counts as the process's memory until
the kernel takes it back, five gigabytes of a shard of that size, and a disk that fails kills the process without a word.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.errors import BadInput
from qrl.formats.header import DTYPES, Entry

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Rows:
    """Reads rows of the matrices of one checkpoint folder; one object a thread.

    Args:
        folder: of the weight files.
        device: where rows are handed over; a GPU is fed from pinned memory.
    """

    def __init__(self, folder: Path | str, device: str = "cpu") -> None:
        self.folder, self.device = Path(folder), device
        self._files: dict[str, int] = {}
        self._buffer: Tensor | None = None

    def read(self, entry: Entry, first: int, last: int) -> Tensor:
        """Rows first to last - 1 of a matrix (O, I), in the dtype as stored.

        On a CPU they lie in the reader's buffer, so the next call overwrites them.

        Raises:
            BadInput: the file ends before the rows do, or cannot be read.
        """
        import torch

        dtype, width = self.dtype(entry), entry.shape[1]
        wanted = (last - first) * width * dtype.itemsize
        if self._buffer is None or self._buffer.numel() < wanted:
            self._buffer = torch.empty(wanted, dtype=torch.uint8, pin_memory=self.device != "cpu")
        raw = self._buffer[:wanted]
        self._fill(memoryview(raw.numpy()), entry.file, entry.start + first * width * dtype.itemsize)
        return raw.view(dtype).view(last - first, width).to(self.device)

    def whole(self, entry: Entry) -> Tensor:
        """A tensor of any shape and dtype, on the CPU, in memory of its own.

        Raises:
            BadInput: as `read`; or torch has no such dtype.
        """
        import torch

        found = torch.empty(entry.shape, dtype=self.dtype(entry))
        if found.numel():
            self._fill(memoryview(found.reshape(-1).view(torch.uint8).numpy()), entry.file, entry.start)
        return found

    def dtype(self, entry: Entry) -> torch.dtype:
        """torch's name of a stored dtype."""
        import torch

        if entry.dtype not in DTYPES:
            raise BadInput(
                f"{self.folder / entry.file} holds a tensor of {entry.dtype}, which torch cannot read: expected one of {', '.join(DTYPES)}."
            )
        return getattr(torch, DTYPES[entry.dtype])

    def close(self) -> None:
        """Closes the files; the reader is of no use afterwards."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _fill(self, view: memoryview, name: str, offset: int) -> None:
        try:
            if name not in self._files:
                self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            while view:
                got = os.preadv(self._files[name], [view], offset)
                if not got:
                    raise BadInput(
                        f"{self.folder / name} ends before its tensors do: it was cut while it was read; copy it again."
                    )
                view, offset = view[got:], offset + got
        except OSError as error:
            raise BadInput(f"{self.folder / name} cannot be read: {error.strerror}.") from None
