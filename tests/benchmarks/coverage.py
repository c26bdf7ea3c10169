"""Do the intervals keep their level? 10,000 simulated studies per row, judged by the code that judges real ones.

    python tests/benchmarks/coverage.py              # the table; exit code 1 if a bound is broken
    python tests/benchmarks/coverage.py --studies 2000

A question has a difficulty that all cells share, one that a variant's cells share, and noise per cell: a Gaussian
copula with exactly the given accuracies, so the true gain and gain survival are known. In the rows "only losses",
quantization turns some of the trained cell's right answers wrong and changes nothing else. Bounds, each with a
tolerance of three Monte Carlo errors: 95 % intervals cover in 95 % of studies (at least that over several runs or if
few answers change, where they are conservative); a wrong verdict at the margin, and McNemar's test under no
difference, in at most 5 %; the bound of the awq gate (trained: quantized − full precision) is wrong in at most 2.5 %.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import ndtri

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl import stats
from qrl.stats.verdict import judge

ALPHA = 0.05
BASE, TRAINED, BASE_Q, TRAINED_Q = range(4)
GAIN, GAIN_Q = (-1, 1, 0, 0), (0, 0, -1, 1)
SURVIVAL, KEPT, LOSS = (1, -1, -1, 1), (0.5, -0.5, -1, 1), (0, -1, 0, 1)


@dataclass(frozen=True)
class Study:
    """True accuracies (base, trained, then both quantized), the correlation of answers, and the margin."""

    name: str
    rates: tuple[float, float, float, float]
    n: int
    question: float = 0.4  # share of the latent variance that all cells of a question have in common
    variant: float = 0.4  # share that the two cells of a variant have in common: quantization changes few answers
    margin: float | None = None
    only_losses: bool = False  # quantization turns right answers of the trained cell wrong, and changes nothing else
    few: bool = False  # so few answers change that intervals are exact ones, which cover more than they promise
    seeds: int = 1
    crossed: bool = True
    run_sd: tuple[float, float] = (
        0.0,
        0.0,
    )  # latent sd of a run's shift of both trained cells, and of the quantized one

    def truth(self, weights: tuple[float, ...]) -> float:
        return float(np.dot(weights, self.rates))


def answers(study: Study, rng: np.random.Generator) -> list[np.ndarray]:
    """Return (4, n) outcomes per run; on the same questions the base's are the same in every run."""
    spread = np.array([0, study.run_sd[0], 0, math.hypot(*study.run_sd)])
    thresholds = ndtri(study.rates) * np.sqrt(1 + spread**2)  # so that the mean over runs is the rate that was put in
    shared = base = None
    runs = []
    for _ in range(study.seeds):
        if shared is None or not study.crossed:
            shared = math.sqrt(study.question) * rng.standard_normal(study.n)
            base = _cells(study, rng, thresholds[[BASE, BASE_Q]], shared)
        common = rng.standard_normal() * study.run_sd[0]
        shifts = thresholds[[TRAINED, TRAINED_Q]] + common + np.array([0, rng.standard_normal() * study.run_sd[1]])
        trained = _cells(study, rng, shifts, shared)
        if study.only_losses:
            kept = rng.random(study.n) < study.rates[TRAINED_Q] / study.rates[TRAINED]
            base, trained = np.stack([base[0]] * 2), np.stack([trained[0], trained[0] * kept])
        runs.append(np.stack([base[0], trained[0], base[1], trained[1]]))
    return runs


def _cells(study: Study, rng: np.random.Generator, thresholds: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Return (2, n) a variant's outcomes at full precision and quantized."""
    both = shared + math.sqrt(study.variant) * rng.standard_normal(study.n)
    own = math.sqrt(1 - study.question - study.variant) * rng.standard_normal((2, study.n))
    return (both + own < thresholds[:, None]).astype(float)


def simulate(study: Study, studies: int, seed: int) -> dict[str, float]:
    """Return the shares of studies with covering intervals, each verdict, a wrong gate bound, and McNemar rejecting."""
    rng = np.random.default_rng(seed)
    groups = [np.arange(study.n) + (0 if study.crossed else study.n * run) for run in range(study.seeds)]
    labels = [str(run) for run in range(study.seeds)]
    n = study.n * (1 if study.crossed else study.seeds)
    found = dict.fromkeys(("gain", "delta", "survival", "survives", "lost", "gate", "mcnemar"), 0.0)
    for _ in range(studies):
        runs = answers(study, rng)

        def contrast(weights: tuple[float, ...], runs: list[np.ndarray] = runs) -> stats.Estimate:
            return (
                stats.contrast(runs[0], weights)
                if study.seeds == 1
                else stats.contrast_over_runs(runs, weights, groups, labels, n)
            )

        gain, delta, survival, kept = (contrast(weights) for weights in (GAIN, GAIN_Q, SURVIVAL, KEPT))
        for name, value, weights in (("gain", gain, GAIN), ("delta", delta, GAIN_Q), ("survival", survival, SURVIVAL)):
            found[name] += value.low <= study.truth(weights) <= value.high
        accuracies = dict(zip("abcd", np.mean([run.mean(axis=1) for run in runs], axis=0), strict=True))
        verdict = judge(gain, survival, kept, accuracies, study.margin).verdict
        if verdict != "inconclusive":
            found[verdict] += 1
        if study.seeds == 1:  # as the gate sees it: one run's cells
            found["gate"] += contrast(LOSS).low > study.truth(LOSS)
            found["mcnemar"] += stats.mcnemar(runs[0][TRAINED], runs[0][BASE]) <= ALPHA
    return {name: count / studies for name, count in found.items()}


def rows() -> list[Study]:
    """Return effects of several sizes; `at the margin` either claim is wrong."""
    found = []
    for n in (500, 1000):
        found += [
            Study("nothing gained", (0.65, 0.65, 0.63, 0.63), n),
            Study("gain 0.05, none lost", (0.65, 0.70, 0.64, 0.69), n),
            Study(
                "gain 0.20, none lost, 1 answer in 70 changes",
                (0.60, 0.80, 0.60, 0.80),
                n,
                question=0.2,
                variant=0.798,
                few=True,
            ),
            Study("gain 0.20, 0.03 lost", (0.60, 0.80, 0.58, 0.75), n),
            Study("at the margin, half the gain", (0.60, 0.80, 0.60, 0.70), n),
            Study(
                "at the margin, half the gain, few answers change",
                (0.60, 0.80, 0.60, 0.70),
                n,
                question=0.2,
                variant=0.78,
            ),
            Study("at the margin, fixed", (0.60, 0.75, 0.58, 0.70), n, margin=0.03),
            Study("at the margin, least, where half the gain begins", (0.60, 0.64, 0.60, 0.62), n),
            Study(
                "at the margin, the same, few answers change", (0.60, 0.64, 0.60, 0.62), n, question=0.2, variant=0.78
            ),
            Study("at the margin, half of a small gain", (0.60, 0.66, 0.60, 0.63), n, question=0.2, variant=0.78),
            Study(
                "at the margin, fixed, only losses",
                (0.60, 0.70, 0.60, 0.68),
                n,
                margin=0.02,
                only_losses=True,
                few=True,
            ),
            Study("at the margin, least, only losses", (0.60, 0.64, 0.60, 0.62), n, only_losses=True, few=True),
        ]
    found.append(
        Study(
            "at the margin, fixed, only losses", (0.60, 0.70, 0.60, 0.68), 300, margin=0.02, only_losses=True, few=True
        )
    )
    for seeds, crossed in ((2, True), (3, True), (5, True), (3, False)):
        found.append(
            Study(
                "at the margin, half the gain",
                (0.60, 0.80, 0.60, 0.70),
                500,
                seeds=seeds,
                crossed=crossed,
                run_sd=(0.08, 0.06),
            )
        )
    found.append(Study("at the margin, runs far apart", (0.60, 0.80, 0.60, 0.70), 500, seeds=3, run_sd=(0.3, 0.2)))
    return found


def broken(study: Study, shares: dict[str, float], error: float) -> list[str]:
    """Return the names of the shares that are outside their bounds."""
    tolerance = 3 * error
    conservative = study.seeds > 1 or study.few
    coverages = [
        name
        for name in ("gain", "delta", "survival")
        if shares[name] < 1 - ALPHA - tolerance or (not conservative and shares[name] > 1 - ALPHA + tolerance)
    ]
    wrong = ("survives", "lost") if "at the margin" in study.name or study.truth(GAIN) == 0 else ()
    claims = [name for name in wrong if shares[name] > ALPHA + tolerance]
    claims += (
        ["gate"] if shares["gate"] > ALPHA / 2 + tolerance / math.sqrt(2) else []
    )  # its Monte Carlo error is smaller by about √2
    size = ["mcnemar"] if study.truth(GAIN) == 0 and shares["mcnemar"] > ALPHA + tolerance else []
    return coverages + claims + size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=10_000)
    studies = parser.parse_args().studies
    error, began, failed = math.sqrt(ALPHA * (1 - ALPHA) / studies), time.monotonic(), []
    print(
        f"{studies:,} studies a row; one Monte Carlo error of 5 % or 95 % is {100 * error:.2f} points. "
        "Coverage of 95 % intervals, shares of verdicts, in %.\n"
    )
    print(
        f"{'':50} {'n':>5} {'seeds':>10} | {'gain':>6} {'delta':>6} {'surv.':>6} | "
        f"{'survives':>8} {'lost':>6} | {'gate':>6} | McNemar"
    )
    for number, study in enumerate(rows()):
        shares = simulate(study, studies, seed=number)
        failed += (problems := broken(study, shares, error))
        runs = f"{study.seeds} {'crossed' if study.crossed else 'nested'}" if study.seeds > 1 else "1"
        numbers = {name: f"{100 * share:.2f}" for name, share in shares.items()}
        if study.seeds > 1:
            numbers |= dict.fromkeys(("gate", "mcnemar"), "-")
        marks = f" BROKEN: {', '.join(problems)}" if problems else ""
        print(
            f"{study.name:50} {study.n:>5} {runs:>10} | "
            f"{numbers['gain']:>6} {numbers['delta']:>6} {numbers['survival']:>6} | "
            f"{numbers['survives']:>8} {numbers['lost']:>6} | {numbers['gate']:>6} | {numbers['mcnemar']:>6}{marks}",
            flush=True,
        )
    result = f"{len(failed)} bounds are broken" if failed else "All bounds hold"
    print(f"\n{result}; {time.monotonic() - began:.0f} s.")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
