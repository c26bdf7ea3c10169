"""Mix a model's full-precision and quantized weights: some linears keep the former, all others have the latter.

    python tests/benchmarks/answer/real/layers.py FULL QUANTIZED OUT      # folders; prints what it wrote

The mixed checkpoint is stored in full precision, so any engine answers it as it is. README.md: "Layers".
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from qrl import checkpoint
from qrl.formats import plain, stored

ENDS = 2  # layers at either end
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def parts(names: Iterable[str]) -> dict[str, Callable[[str], bool]]:
    """Return what a mixture keeps in full precision: its label → whether a matrix of that name is kept.

    Args:
        names: of the quantized matrices, `model.layers.0.self_attn.q_proj.weight`.
    """
    names = list(names)
    last = max(_layer(name) for name in names)
    kinds = sorted({_kind(name) for name in names})
    kept: dict[str, Callable[[str], bool]] = {"none": lambda name: False}
    for kind in kinds:
        kept[kind] = lambda name, kind=kind: _kind(name) == kind
    kept["ends"] = lambda name: _layer(name) < ENDS or _layer(name) > last - ENDS
    return kept


def _kind(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found.group(1)) if found else -1


def write(full: Path, quantized: Path, out: Path) -> dict[str, Path]:
    """Write one checkpoint for each of `parts` below `out`, and return their folders by label.

    Args:
        full: checkpoint in full precision.
        quantized: the same model, quantized.
        out: made if it is missing.

    Raises:
        BadInput: `quantized` is in full precision, or in a packing that is not known here.
    """
    import torch
    from safetensors.torch import save_file

    own = dict(checkpoint.tensors(full))
    dtype = getattr(torch, checkpoint.check(full).dtype)
    rounded = {name: matrix.values.to(dtype) for name, matrix in stored.matrices(quantized, stored.names(quantized))}
    folders = {}
    for label, is_kept in parts(rounded).items():
        folder = folders[label] = out / label
        folder.mkdir(parents=True, exist_ok=True)
        mixed = {name: own[name] if is_kept(name) else values for name, values in rounded.items()}
        save_file(
            {name: tensor.contiguous() for name, tensor in (own | mixed).items()},
            folder / checkpoint.WEIGHTS,
            {"format": "pt"},
        )
        (folder / "config.json").write_text(json.dumps(checkpoint.config(full), indent=1))
        plain.copy_text_files(full, folder)
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("full", type=Path)
    parser.add_argument("quantized", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    for label, folder in write(given.full, given.quantized, given.out).items():
        print(f"{label}: {folder}")


if __name__ == "__main__":
    main()
