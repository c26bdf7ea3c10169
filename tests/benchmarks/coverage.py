"""Do the intervals keep their level? Simulated studies, judged by the code that judges real ones.

    python tests/benchmarks/coverage.py                  # the tables; exit code 1 if a bound is broken
    python tests/benchmarks/coverage.py --studies 1000   # faster
    python tests/benchmarks/coverage.py --only cluster   # rows whose name contains a text
    python tests/benchmarks/coverage.py --write          # puts the tables into results/coverage.md

`regimes.py` has the rows. Bounds, each with a tolerance of three Monte Carlo errors: 95 % intervals cover in 95 % of
studies (or more, where few answers change, over clusters and runs, and at small n); an interval of a share, which is
printed only where the whole is shown to be above 0, is printed and wrong in at most 5 %; each verdict is wrong in at
most 5 %; McNemar's test rejects in at most 5 % where nothing is gained; the bound of the awq gate (trained: quantized −
full precision) is wrong in at most 2.5 %. Rows that are known not to hold are marked and say why.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl import stats
from qrl.stats.simulate import BASE, TRAINED, TRAINED_Q, share_of_gain
from qrl.stats.verdict import WORDS, Gains
from tests.benchmarks.regimes import GAIN, GAIN_Q, SURVIVAL, Answers, Study, rows

ALPHA = 0.05
TOLERANCE = 3  # Monte Carlo errors
PART = 250  # studies that a process simulates at a time, so that all processes have work to the end
LOSS = (0, -1, 0, 1)  # trained: quantized − full precision
INTERVALS = ("gain", "delta", "survival", "kept", "accuracy", "ratio", "log-odds")
SHARES = ("kept", "accuracy")  # defined only where the whole is shown to be above 0
EXACT = ("gain", "delta", "survival")  # cover no more than they promise either, unless they are conservative by design
PAGE = Path(__file__).parent / "results" / "coverage.md"
BLOCK = re.compile(r"```\n[\d,]+ studies a row.*?```", re.DOTALL)


@dataclass(frozen=True)
class Rate:
    """How often something happens in simulated studies.

    Attributes:
        hits: studies in which it happens.
        studies: studies in which it can be said whether it does.
    """

    hits: int
    studies: int

    @property
    def share(self) -> float:
        return self.hits / self.studies if self.studies else math.nan

    @property
    def error(self) -> float:
        """Monte Carlo error."""
        return math.sqrt(self.share * (1 - self.share) / self.studies) if self.studies else math.nan

    def is_above(self, bound: float) -> bool:
        """Return whether the share is above a bound by more than `TOLERANCE` errors that it would have at the bound."""
        return bool(self.studies) and self.share > bound + TOLERANCE * self._error_at(bound)

    def is_below(self, bound: float) -> bool:
        return bool(self.studies) and self.share < bound - TOLERANCE * self._error_at(bound)

    def _error_at(self, share: float) -> float:
        return math.sqrt(share * (1 - share) / self.studies)

    def __str__(self) -> str:
        return f"{100 * self.share:.1f}±{100 * self.error:.1f}" if self.studies else "-"


@dataclass(frozen=True)
class Result:
    """What a regime's simulated studies gave.

    Attributes:
        study: the regime.
        rates: by name: coverage of `INTERVALS` where they are defined, how often `kept` is not (`undefined`), `WORDS`,
            `gate`, `mcnemar`.
    """

    study: Study
    rates: dict[str, Rate]

    @property
    def studies(self) -> int:
        return self.rates["inconclusive"].studies

    @property
    def wrong(self) -> Rate:
        """Studies with a wrong verdict."""
        wrong = [self.rates[word] for word in self.study.wrong_words]
        return Rate(sum(rate.hits for rate in wrong), self.studies)

    def not_misled(self, name: str) -> Rate:
        """Studies whose interval covers, or which have none: those that print a wrong one are the rest."""
        misses = self.rates[name].studies - self.rates[name].hits
        return Rate(self.studies - misses, self.studies)


def observe(study: Study, answers: Answers) -> dict[str, bool]:
    """Return what holds in one study; what cannot be said is left out."""
    contrast = answers.contrast
    share = share_of_gain(contrast)
    word = Gains(share, study.margin).word()
    found = {each: each == word for each in WORDS}
    found |= {
        "gain": _covers(share.whole, study.truth(GAIN)),
        "delta": _covers(share.part, study.truth(GAIN_Q)),
        "survival": _covers(share.difference, study.truth(SURVIVAL)),
        "undefined": not share.whole.low > 0,
    }
    # The ends of a share's interval are where a bound of `beyond` is 0. So it covers where these bounds enclose 0.
    if study.kept is not None and share.whole.low > 0:
        found["kept"] = _covers(share.beyond(study.kept), 0.0)
    loss = contrast(LOSS)
    trained, trained_q = study.rates[TRAINED], study.rates[TRAINED_Q]
    of_accuracy = stats.Share(
        part=contrast((0, 0, 0, 1)),
        whole=contrast((0, 1, 0, 0)),
        difference=loss,
        excess_over=lambda kept: contrast((0, -kept, 0, 1)),
    )
    if of_accuracy.whole.low > 0:
        found["accuracy"] = _covers(of_accuracy.beyond(trained_q / trained), 0.0)
    if min(study.rates) > 0 and max(study.rates) < 1:
        found |= _on_other_scales(study, answers)
    if study.is_independent:
        found["gate"] = loss.low > study.truth(LOSS)
        found["mcnemar"] = _mcnemar(answers) <= ALPHA
    return found


def _covers(estimate: stats.Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


def _on_other_scales(study: Study, answers: Answers) -> dict[str, bool]:
    """Return whether the intervals of the ratio of accuracies kept and of the difference in log-odds cover."""

    def contrast(weights: tuple[float, ...]) -> stats.Estimate:
        trained_q, trained, base_q, base = weights
        return answers.contrast((base, trained, base_q, trained_q))

    base, trained, base_q, trained_q = study.rates
    observed = answers.accuracies[[3, 1, 2, 0]]
    odds = [rate / (1 - rate) for rate in study.rates]
    ratio = (trained_q / trained) / (base_q / base)
    log_odds = math.log(odds[TRAINED_Q] / odds[TRAINED]) - math.log(odds[2] / odds[BASE])
    return {
        "ratio": _covers(stats.ratio_of_shares(observed, contrast, answers.n), ratio),
        "log-odds": _covers(stats.difference_in_log_odds(observed, contrast, answers.n), log_odds),
    }


def _mcnemar(answers: Answers) -> float:
    """Return the p-value of trained against base at full precision, from counts."""
    base, trained = (np.repeat(answers.outcomes[0][cell], answers.counts) for cell in (BASE, TRAINED))
    return stats.mcnemar(trained, base)


def simulate(study: Study, studies: int, seed: tuple[int, ...]) -> Result:
    """Return the rates over simulated studies of a regime."""
    rng = np.random.default_rng(seed)
    hits: Counter[str] = Counter()
    said: Counter[str] = Counter()
    for _ in range(studies):
        found = observe(study, study.draw(rng))
        hits.update(name for name, holds in found.items() if holds)
        said.update(found.keys())
    names = (*INTERVALS, "undefined", *WORDS, "gate", "mcnemar")
    return Result(study, {name: Rate(hits[name], said[name]) for name in names})


def merged(parts: list[Result]) -> Result:
    """Return the rates over all studies of a regime."""
    rates = {}
    for name in parts[0].rates:
        of_parts = [part.rates[name] for part in parts]
        rates[name] = Rate(sum(rate.hits for rate in of_parts), sum(rate.studies for rate in of_parts))
    return Result(parts[0].study, rates)


def simulate_all(chosen: dict[int, Study], studies: int, processes: int) -> list[Result]:
    """Return the result of each row, by its place among all rows.

    The place and the number of a part are the seed, so that a row gives the same numbers alone.
    """
    sizes = [min(PART, studies - start) for start in range(0, studies, PART)]
    os.environ["OMP_NUM_THREADS"] = "1"  # read by processes as they start
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        parts = {
            place: [pool.submit(simulate, study, size, (place, part)) for part, size in enumerate(sizes)]
            for place, study in chosen.items()
        }
        return [merged([part.result() for part in of_row]) for of_row in parts.values()]


def broken(result: Result) -> list[str]:
    """Return the names of the rates that are outside their bounds."""
    study, rates = result.study, result.rates
    found = []
    for name in INTERVALS:
        covering = result.not_misled(name) if name in SHARES else rates[name]
        too_much = name in EXACT and not study.may_cover_more and covering.is_above(1 - ALPHA)
        if covering.is_below(1 - ALPHA) or too_much:
            found.append(name)
    found += [word for word in study.wrong_words if rates[word].is_above(ALPHA)]
    if rates["gate"].is_above(ALPHA / 2):
        found.append("gate")
    if study.gain == 0 and rates["mcnemar"].is_above(ALPHA):
        found.append("mcnemar")
    return found


def remark(result: Result) -> str:
    """Return what stands behind a row: its broken bounds, and why they may be."""
    names = broken(result)
    if result.study.exception:
        return f"  not held: {', '.join(names) or 'nothing here'} ({result.study.exception})"
    return f"  BROKEN: {', '.join(names)}" if names else ""


def as_text(results: list[Result]) -> str:
    """Return both tables."""
    lines = ["Coverage of 95 % intervals, in %.", "", _line("", "n", "runs", *INTERVALS, "no kept")]
    for result in results:
        rates = result.rates
        lines.append(_line(*_head(result.study), *(rates[name] for name in INTERVALS), rates["undefined"]))
    lines += ["", "Verdicts, and those of them that are wrong, in %.", ""]
    lines.append(
        _line("", "n", "runs", "lost", "survives", "reduced", "inconcl.", "wrong", "gate", "McNemar")
        + "  wrong would be"
    )
    for result in results:
        rates = result.rates
        numbers = (*(rates[word] for word in WORDS), result.wrong, rates["gate"], rates["mcnemar"])
        line = _line(*_head(result.study), *numbers)
        lines.append(f"{line}  {', '.join(result.study.wrong_words)}{remark(result)}".rstrip())
    return "\n".join(lines)


def _head(study: Study) -> tuple[str, int, int]:
    return study.name, study.n, study.runs


def _line(name: str, n: int | str, runs: int | str, *numbers: Rate | str) -> str:
    return f"{name:50}{n:>5}{runs:>5} " + "".join(f"{number!s:>10}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=int, default=10_000, help="of each row")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains it")
    parser.add_argument("--write", action="store_true", help="put the tables into results/coverage.md")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write replaces the page's tables whole: leave --only out")
    chosen = {place: study for place, study in enumerate(rows()) if options.only in study.name}
    if not chosen:
        parser.error(f"no row's name contains {options.only!r}")
    began = time.monotonic()
    results = simulate_all(chosen, options.studies, options.processes)
    failed = [name for result in results if not result.study.exception for name in broken(result)]
    seconds = time.monotonic() - began
    text = f"{options.studies:,} studies a row; ± is one Monte Carlo error.\n\n{as_text(results)}\n\n"
    text += f"{len(failed)} bounds are broken" if failed else "All bounds hold"
    text += f"; {seconds:.0f} s, {options.processes} processes on {platform.machine()}.\n"
    print(text)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(BLOCK.sub(lambda _: f"```\n{text}```", page, count=1), encoding="utf-8")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
