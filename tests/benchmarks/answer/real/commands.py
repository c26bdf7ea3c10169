"""Commands of qrl below one folder and with one store: each is run once, a few of a kind at a time."""

import heapq
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from filelock import FileLock

from qrl.errors import QrlError
from qrl.tracking import addresses

ROOT = Path(__file__).parents[4]
THREADS = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 8))}  # of a command: many run side by side
# What a step prints at its end (steps/outcome.py). Engines print lines of their own to the same place.
RESULT = re.compile(r"^(?:Model|Adapter|Models) +(\S*(?:models|runs):/\S+)", re.MULTILINE)
LLM_COMPRESSOR = ("quantize", "diagnose")  # steps that write, or read by transformers, what llm-compressor writes
MAKES = ("train", "merge", "quantize")  # steps that print a result


class Slots:
    """Places for work that runs at the same time; of what waits, the lowest rank goes first, then the oldest."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int]] = []  # a heap
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    @contextmanager
    def take(self, rank: int) -> Iterator[None]:
        """Wait for a place, and hold it in the `with` block."""
        ticket = (rank, next(self._numbers))
        with self._changed:
            heapq.heappush(self._waiting, ticket)
            self._changed.wait_for(lambda: self._free and self._waiting[0] == ticket)
            heapq.heappop(self._waiting)
            self._free -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()


class Commands:
    """Commands with one store, each known by a name; one that ended well is not run again.

    Attributes:
        folder: holds the store, `logs` and what commands write.
        store: address of the store.
        failed: names of the commands that failed in this call.
        left: names of those that were not begun, because the time was up.
    """

    def __init__(
        self,
        folder: Path,
        limits: Mapping[str, int] | int,
        *,
        quantize_path: str = "",
        stop_after_s: float | None = None,
    ) -> None:
        """Prepare a folder.

        Args:
            folder: made if it is missing.
            limits: step → how many of its commands run at a time, or how many of all steps together. A step without a
                limit runs alone.
            quantize_path: put before PYTHONPATH for LLM_COMPRESSOR, whose libraries vLLM's environment cannot hold.
            stop_after_s: seconds after which no command is begun; None: no limit.
        """
        self.folder = folder.resolve()
        self.store = f"sqlite:///{self.folder}/store.db"
        self.failed: list[str] = []
        self.left: list[str] = []
        self._quantize_path = quantize_path
        together = Slots(limits if isinstance(limits, int) else 1)
        by_step = {} if isinstance(limits, int) else {step: Slots(count) for step, count in limits.items()}
        self._slots = defaultdict(lambda: together, by_step)
        self._printing = threading.Lock()
        self._began = time.monotonic()
        self._stop_after_s = stop_after_s
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def whole(self) -> bool:
        """Whether every command was begun and ended well."""
        return not self.failed and not self.left

    @property
    def time_is_up(self) -> bool:
        """Whether no further command is begun."""
        return self._stop_after_s is not None and time.monotonic() - self._began > self._stop_after_s

    def run(self, step: str, name: str, *words: str, rank: int = 0) -> str | None:
        """Run `qrl STEP WORDS` unless it was done before, and return the result that it printed.

        A second call with the same name waits for the first. Of the commands that wait for a place, those of the lowest
        rank begin first.

        Returns:
            An address, or addresses as `variant:scheme=ADDRESS,…`; empty if the step prints none. None if the command
            failed, in this call or in a call before that waited, or was not begun.

        Raises:
            QrlError: the step ended well and did not print what it made.
        """
        out, done = self.path(f"{name}.out"), self.path(f"{name}.done")
        with FileLock(self.path(f"{name}.lock")):
            if not done.exists():
                if name in self.failed or not self._run(step, name, words, rank):
                    return None
                done.touch()
        printed = RESULT.findall(out.read_text())
        if step in MAKES and not printed:
            raise QrlError(f"{name} ended well, but {out} does not say what it made: look there.")
        return printed[-1].rstrip(",") if printed else ""

    def folder_of(self, address: str) -> Path:
        """Return the folder of a model: of one in the store, or the folder that the address is."""
        if not address.startswith("models:/"):
            return Path(address)
        import mlflow

        mlflow.set_tracking_uri(self.store)
        return Path(addresses.folder(address))

    def path(self, file: str) -> Path:
        """Return the path of a log."""
        return self.folder / "logs" / file

    def _run(self, step: str, name: str, words: tuple[str, ...], rank: int) -> bool:
        with self._slots[step].take(rank):
            if self.time_is_up:
                self.left.append(name)
                return False
            began = time.monotonic()
            with self.path(f"{name}.out").open("w") as out, self.path(f"{name}.err").open("w") as err:
                command = [sys.executable, "-m", "qrl", step, *words]
                code = subprocess.run(
                    command, cwd=ROOT, env=self._variables(step), stdout=out, stderr=err, check=False
                ).returncode
        seconds = time.monotonic() - began
        ended = "done" if code == 0 else f"FAILED with {code}, see {self.path(f'{name}.err')},"
        with self._printing:
            print(f"{time.monotonic() - self._began:6.0f} s  {name}: {ended} after {seconds:.0f} s", flush=True)
        if code:
            self.failed.append(name)
        return code == 0

    def _variables(self, step: str) -> dict[str, str]:
        before = self._quantize_path if step in LLM_COMPRESSOR else ""
        search = os.pathsep.join(filter(None, (str(ROOT), before, os.environ.get("PYTHONPATH", ""))))
        place = {} if step in LLM_COMPRESSOR else {"QRL_PLACE": "vllm"}  # the others run beside vLLM
        return THREADS | os.environ | {"MLFLOW_TRACKING_URI": self.store, "PYTHONPATH": search} | place
