"""Fuzz the readers of files of `tests/test_hostile.py` with atheris, by coverage of qrl's code.

    uv pip install --target FOLDER atheris==3.0.0 model-signing==1.1.1 pyopenssl==26.4.0   # in no environment of ours
    PYTHONPATH=FOLDER python -m tests.benchmarks.fuzz --seconds 600 [--only "lines;record"]

Each reader has a process of its own, which starts from files that hypothesis makes for it. Prints a line of JSON per
reader: files tried, and the finding if there is one. Exit code 1 if there is any.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

SEEDS = 60  # files that hypothesis makes
STUCK_S = 20  # of one file, after which libFuzzer ends the process


def one(name: str, folder: Path, options: list[str]) -> None:
    """Fuzz one reader in this process; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["qrl"]):
        from tests import test_hostile as hostile
    hostile.prepare(name)
    warnings.simplefilter("ignore")
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(SEEDS):
        (corpus / str(number)).write_bytes(hostile.READERS[name][1].example())
    (place := folder / "place").mkdir()
    words = ["fuzz", str(corpus), f"-artifact_prefix={folder}/", f"-timeout={STUCK_S}", *options]
    atheris.Setup(words, lambda content: hostile.check_reader(name, place, content))
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="for all readers together")
    parser.add_argument("--only", default="", help="names of READERS, by semicolon")
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        one(given.here[0], Path(given.here[1]), [f"-max_total_time={given.seconds}", "-print_final_stats=1"])
    from tests.test_hostile import READERS

    names = [part.strip() for part in given.only.split(";")] if given.only else list(READERS)
    found = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            command = [sys.executable, "-m", __spec__.name, "--seconds", str(given.seconds // len(names))]
            done = subprocess.run([*command, "--here", name, folder], capture_output=True, text=True, check=False)
            tried = re.search(r"number_of_executed_units: (\d+)", done.stderr)
            row = {"reader": name, "files": int(tried[1]) if tried else 0, "seconds": round(time.monotonic() - began)}
            if done.returncode or not tried:
                found += 1
                row["finding"] = done.stderr[-3000:]
                row["file"] = [repr(path.read_bytes()[:2000]) for path in Path(folder).glob("*-*")]
        print(json.dumps(row), flush=True)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
