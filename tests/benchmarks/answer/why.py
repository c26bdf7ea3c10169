"""Measure on a sweep's models which weights training moved, where they lie, and what MXFP4's error is made of.

    python tests/benchmarks/answer/why.py WORK      # writes WORK/export/why.parquet, on all cores

A row is a matrix of a linear layer, in a variant of a size and seed:

moved               share of the stored weights that differ from the base's, bit for bit
moved_fp32          share of the masters that do, before they are stored; of a whole model, tensor "all"
principal           share of moved weights among the principal ones, over `moved`: below 1, training avoids them.
                    Principal is the tenth of the weights that is largest in W's best approximation of a tenth of its
                    rank
principal_by_size   the same over what it would be if a weight's binary exponent alone decided whether it moves: the
                    steps of bf16 are larger for larger weights
rotation_deg        mean angle between the leading left singular vectors of W, a tenth of the rank, and the trained W's
spectrum_shift      ‖σ(trained) − σ(W)‖ / ‖σ(W)‖
again, again_lift   of a pair of seeds: share of weights that both moved, and that share over what two independent draws
                    would give; both are the same for the two
mx_scale, mx_dead, mx_grid     squared error of MXFP4 over ‖W‖², in three parts that add up weight by weight: a scale
                    that is a power of two instead of max|w| / 6; weights that the exact scale rounds to 0; the rest
mx_error            of the three together; their squares differ from it by the products of the parts

Source: principal weights and rotation after Zhu et al., arXiv 2511.08567; the three parts after Li et al., arXiv
2605.20402, by their abstract; MXFP4 as `train.qat=mxfp4` rounds it.
"""

import argparse
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

import export
import pandas as pd
import tables
import torch

from qrl import checkpoint, names
from qrl.diagnose import weights
from qrl.formats.fakequant import rounding
from qrl.tracking import addresses

SHARE = 0.1  # of the rank, and of the weights
LARGEST = 6.0  # of E2M1


def principal(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a matrix's principal weights as a mask, its leading left singular vectors, and all singular values."""
    vectors, values = leading(matrix)
    sizes = (vectors @ (vectors.T @ matrix)).abs()
    kept = sizes.flatten().topk(max(1, int(SHARE * sizes.numel()))).indices
    mask = torch.zeros(sizes.numel(), dtype=torch.bool)
    mask[kept] = True
    return mask.view_as(sizes), vectors, values


def leading(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the leading left singular vectors, a tenth of the rank, and all singular values.

    They come from the smaller Gram matrix in float64, which is taken apart in a fraction of an SVD's time.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if tall else matrix).double()
    squares, vectors = torch.linalg.eigh(wide @ wide.T)  # ascending
    values = squares.flip(0).clamp(min=0).sqrt()
    kept = vectors.flip(1)[:, : max(1, int(SHARE * len(values)))]
    if tall:
        kept = matrix.double() @ kept / values[: kept.shape[1]]
    return kept.to(matrix.dtype), values.to(matrix.dtype)


def mxfp4(matrix: torch.Tensor) -> dict[str, float]:
    """Return the squared error of MXFP4, as qrl stores it, and of its three parts, over the matrix's squared norm."""
    args = rounding.scheme("mxfp4").weights
    (stored,), *_ = rounding.scales([matrix], args)
    exact = matrix.unflatten(-1, (-1, args.group_size)).abs().amax(-1).clamp(min=1e-30) / LARGEST
    made = {name: rounding.values(matrix, args, scale, None) for name, scale in (("exact", exact), ("stored", stored))}
    rounded = made["exact"] - matrix
    parts = {"scale": made["stored"] - made["exact"], "dead": rounded.where(made["exact"] == 0, 0.0)}
    parts["grid"] = rounded - parts["dead"]
    whole, errors = matrix.square().sum(), parts | {"error": made["stored"] - matrix}
    return {f"mx_{name}": float(part.square().sum() / whole) for name, part in errors.items()}


def measure(base: dict[str, torch.Tensor], variants: dict[tuple[str, int], Path]) -> list[dict]:
    """Return the rows of a size; `variants` are folders by variant and seed. Each core takes a matrix at a time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as cores:
            parts = cores.map(lambda name: _rows(name, base[name], variants), base)
            return list(itertools.chain.from_iterable(parts))
    finally:
        torch.set_num_threads(threads)


def _rows(name: str, stored: torch.Tensor, variants: dict[tuple[str, int], Path]) -> list[dict]:
    """Return the rows of one matrix."""
    before, moved = stored.float(), {}
    mask, vectors, values = principal(before)
    rows = [{"variant": names.BASE, "seed": -1, "tensor": name, "numel": stored.numel(), **mxfp4(before)}]
    for (variant, seed), folder in variants.items():
        ((_, trained),) = checkpoint.tensors(folder, [name])
        moved[variant, seed] = changed = trained != stored
        after = trained.float()
        turned, values_after = leading(after)
        cosines = torch.linalg.svdvals(vectors.T @ turned).clamp(max=1)
        row = {"variant": variant, "seed": seed, "tensor": name, "numel": stored.numel()}
        row |= {"moved": float(changed.float().mean())} | _among_principal(changed, mask, before)
        row["rotation_deg"] = float(cosines.arccos().rad2deg().mean())
        row["spectrum_shift"] = float((values_after - values).norm() / values.norm())
        rows.append(row | mxfp4(after))
    return rows + _again(name, moved)


def _among_principal(changed: torch.Tensor, mask: torch.Tensor, before: torch.Tensor) -> dict[str, float]:
    """Return the share of moved weights among the principal ones, over that of all, and over that of their sizes."""
    exponents = before.frexp().exponent.flatten() + 256
    totals = torch.bincount(exponents, minlength=512)
    shares = torch.bincount(exponents, changed.flatten().float(), 512) / totals.clamp(min=1)
    within, expected = float(changed[mask].float().mean()), float(shares[exponents[mask.flatten()]].mean())
    share = float(changed.float().mean())
    return {
        "principal": within / share if share else float("nan"),
        "principal_by_size": within / expected if expected else float("nan"),
    }


def _again(name: str, moved: dict[tuple[str, int], torch.Tensor]) -> list[dict]:
    """Return a row for each pair of seeds of a variant: the share of weights that both moved."""
    rows = []
    for (one, first), (other, second) in itertools.combinations(moved, 2):
        if one == other:
            masks = moved[one, first], moved[other, second]
            both = float((masks[0] & masks[1]).float().mean())
            chance = float(masks[0].float().mean() * masks[1].float().mean())
            row = {"variant": one, "seed": first, "other": second, "tensor": name, "numel": masks[0].numel()}
            rows.append(row | {"again": both, "again_lift": both / chance if chance else float("nan")})
    return rows


def masters(store: str) -> list[dict]:
    """Return a row for each training of all weights: the share of its masters that moved."""
    from mlflow import MlflowClient

    client, rows = MlflowClient(store), []
    query = f"{export.FINISHED} and tags.`{names.TAG_STEP}` = 'train' and metrics.`train/moved_share` >= 0"
    for run in client.search_runs(["0"], query, max_results=1000):
        parent = run.data.tags.get("mlflow.parentRunId")  # none above a training that no sweep began
        of = (client.get_run(parent) if parent else run).data.params
        fp8 = "-fp8" if run.data.params["rollout.quantization"] == "fp8" else ""
        row = {"size": Path(of["model"]).name, "variant": run.data.tags[names.TAG_VARIANT] + fp8, "numel": 1}
        share = run.data.metrics["train/moved_share"]
        rows.append(row | {"seed": int(of["seed"]), "tensor": "all", "moved_fp32": share})
    return rows


def write(work: Path) -> None:
    """Write the rows of every size in a folder of run.py to `export/why.parquet` there."""
    store = f"sqlite:///{work.resolve()}/store.db"
    by_size: dict[str, dict[tuple[str, int], Path]] = {}
    for (base, seed, variant, scheme), run in export.cells(store).items():
        if scheme == names.FULL and variant in (names.GRPO, names.SFT):
            folder = addresses.folder(export.address(store, run))
            by_size.setdefault(base, {})[variant, seed] = folder
    frames = []
    for base, variants in by_size.items():
        matrix_names = [name for name, _ in weights.matrices(base)]
        wanted = [name for name in matrix_names if weights.tensor_labels(name)["layer"] >= 0]  # the head stays
        frame = pd.DataFrame(measure(dict(checkpoint.tensors(base, wanted)), variants))
        frames.append(frame.assign(size=Path(base).name))
        print(f"{Path(base).name}: {len(wanted)} matrices of {len(variants)} models", flush=True)
    frames.append(pd.DataFrame(masters(store)))
    if by_size:
        tables.write(work / "export", why=pd.concat(frames, ignore_index=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of run.py")
    write(parser.parse_args().work)


if __name__ == "__main__":
    main()
