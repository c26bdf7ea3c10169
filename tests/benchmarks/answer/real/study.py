"""What an export of the real model holds, and how its numbers are written on the page."""

import math
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import pandas as pd
import summary
import tables
from evidence import BASE, GRPO, SEEN, Evidence, loss
from summary import LORA, NONE, PRIMARY, SAME_RATE, SCHEMES, Tested

from qrl import names
from qrl.errors import BadInput
from qrl.stats import LEVEL, Estimate, quantile
from qrl.stats.text import interval, p_text, percent_interval

MODEL, PARAMETERS, STORED = "SmolLM2-135M-Instruct", "135 M", "Q4_1"
WIDTH = 140  # characters in a line of text
OF_OUTPUTS = ("layer_error", "kl", "top1_agreement")  # measures of what a model says; the others are of its weights
OUTPUT_MEASURE = OF_OUTPUTS[0]
RATE = "train.learning_rate"
NAMED = {
    BASE: "the base",
    GRPO: "GRPO's model",
    names.SFT: "SFT's model",
    SAME_RATE: "SFT at GRPO's rate",
    LORA: "LoRA's model",
}


@dataclass(frozen=True)
class Study:
    """What an export of the real model holds.

    Attributes:
        frame: a row per answer, of all tasks.
        cells, measures, runs: from `tables.measures`; None if the export has none.
    """

    frame: pd.DataFrame
    cells: pd.DataFrame | None = None
    measures: pd.DataFrame | None = None
    runs: pd.DataFrame | None = None

    @classmethod
    def read(cls, folders: str) -> "Study":
        """Return the study of exports, by comma; raise BadInput if a folder is no export, or lacks the outcome."""
        paths = [Path(part) for part in folders.split(",")]
        if absent := [path for path in paths if not (path / "correct.parquet").is_file()]:
            raise BadInput(f"{absent[0]} holds no correct.parquet: give a folder that real/collect.py wrote.")
        study = cls(tables.answers(paths), *(tables.measures(paths, name) for name in ("cells", "measures", "runs")))
        if study.primary is None:
            cells = f"base and {GRPO}, in full precision and under {PRIMARY}"
            raise BadInput(f"{folders} has no seed of the study (2 or above) with the primary outcome: {cells}.")
        return study

    @cached_property
    def evidence(self) -> Evidence:
        """The answers to sums."""
        return Evidence(self.frame[self.frame["size"] == "sums"])

    @cached_property
    def words(self) -> Evidence | None:
        """The answers to GSM8K; None if it was not run."""
        own = self.frame[self.frame["size"] == "gsm8k"]
        return Evidence(own, one_base=False) if len(own) else None

    @cached_property
    def families(self) -> dict[summary.Family, dict[str, Tested]]:
        """All tests, by family and scheme."""
        return summary.families(self.evidence)

    def tested(self, variant: str, other: str) -> dict[str, Tested]:
        """Return the tests of a variant beside another one, by scheme, in the order of SCHEMES."""
        found: dict[str, Tested] = {}
        for each, tests in self.families.items():
            if (each.variant, each.other) == (variant, other):
                found |= tests
        return {scheme: found[scheme] for scheme in SCHEMES if scheme in found}

    @property
    def primary(self) -> Tested | None:
        """The primary outcome."""
        return self.tested(GRPO, BASE).get(PRIMARY)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the primary outcome."""
        return self.primary.value.seeds

    def cost(self, variant: str, scheme: str) -> Estimate | None:
        """Return what a scheme costs a variant."""
        return self.evidence.contrast(loss(variant, scheme))

    @cached_property
    def trainings(self) -> pd.DataFrame:
        """A row for each training or merge under a seed of the study; columns: variant, and what MLflow has of it."""
        if self.runs is None:
            return pd.DataFrame(columns=["variant"])
        wide = self.runs.pivot_table(index="run", columns="key", values="value", aggfunc="first")
        wide = wide.reindex(
            columns=wide.columns.union(["seed", names.TAG_TASK, names.TAG_STEP, names.TAG_VARIANT, "train.method"])
        )
        own = wide[wide[names.TAG_STEP].isin(["train", "merge"]) & ~wide["seed"].isin(map(str, SEEN))]
        own = own[own[names.TAG_TASK].fillna("").str.startswith("sums")]
        is_lora = own["train.method"].eq(LORA) | own[names.TAG_STEP].eq("merge")  # a store calls it grpo
        variant = own[names.TAG_VARIANT].mask(is_lora, LORA)
        if RATE in own:  # a store calls both of them sft
            is_same_rate = variant.eq(names.SFT) & own[RATE].astype(float).eq(float(SAME_RATE.removeprefix("sft-")))
            variant = variant.mask(is_same_rate, SAME_RATE)
        return own.assign(variant=variant)

    def setting(self, variant: str, key: str) -> str:
        """Return a setting of a variant's trainings if all have the same; else nothing."""
        own = self.trainings
        if key not in own:
            return ""
        values = own.loc[(own["variant"] == variant) & (own[names.TAG_STEP] == "train"), key].dropna().unique()
        return values[0] if len(values) == 1 else ""

    def moved(self, variant: str) -> str:
        """Return the share of stored weights that training moved, least to largest over seeds; "" if not known."""
        own = self.trainings
        key = "merge/moved_share_stored" if variant == LORA else "train/moved_share_stored"
        if key not in own:
            return ""
        shares = 100 * own.loc[own["variant"] == variant, key].dropna().astype(float)
        if shares.empty:
            return ""
        low, high = f"{shares.min():.0f}", f"{shares.max():.0f}"
        return f"{low} %" if low == high else f"{low} to {high} %"


def over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean of a value per seed, with Student's interval."""
    series = pd.Series(values)
    stderr = float(series.std(ddof=1)) / math.sqrt(len(values))
    mean, reach = float(series.mean()), -quantile((1 - LEVEL) / 2, len(values) - 1) * stderr
    return Estimate(mean, stderr, mean - reach, mean + reach, len(values), len(values) - 1)


def wrapped(part: str) -> str:
    """Break a paragraph into lines; intervals, and a number and its unit, stay in one."""
    if part.startswith(("!", "#", "|")):
        return part
    unbroken = re.sub(r"\[[^]]*\]|\d %|\bn = \d", lambda found: found[0].replace(" ", "\u00a0"), part)
    return textwrap.fill(unbroken, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\u00a0", " ")


def seeds_text(seeds: Sequence[int], *, bare: bool = False, listed: bool = False) -> str:
    """Return how many seeds, or which ones."""
    word = "seed" if len(seeds) == 1 else "seeds"
    if listed:
        return f"{word} {', '.join(map(str, seeds))}"
    number = str(len(seeds)) if bare else {1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five"}.get(len(seeds))
    return f"{number or len(seeds)} {word}"


def rate(value: Estimate) -> str:
    return f"{value.estimate:.3f} [{value.low:.3f}, {value.high:.3f}]"


def loss_text(value: Estimate) -> str:
    """Return a loss with its interval, without a sign where all of it is above 0."""
    return rate(value) if value.low > 0 else interval(value)


def share_text(value: Estimate | None) -> str:
    return "an undefined share" if value is None else percent_interval(value)


def share_or_undefined(value: Estimate | None) -> str:
    return "not defined" if value is None else percent_interval(value)


def ratio_text(value: Estimate) -> str:
    return _formatted(value, "{:.2f}")


def two_decimals(value: Estimate) -> str:
    return _formatted(value, "{:+.2f}")


def _formatted(value: Estimate, form: str) -> str:
    estimate, low, high = (number(each, form) for each in (value.estimate, value.low, value.high))
    return f"{estimate} [{low}, {high}]"


def p_value(value: float | None) -> str:
    return "not tested" if value is None else f"p = {p_text(value)}"


def difference_text(value: Estimate | None) -> str:
    return NONE if value is None else interval(value)


def correlation_text(value: float) -> str:
    return number(value, "{:+.2f}")


def number(value: float, form: str) -> str:
    return "" if math.isnan(value) else form.format(value).replace("-", "−")


def code(words: Iterable[str]) -> str:
    return joined(f"`{word}`" for word in words)


def joined(words: Iterable[str]) -> str:
    *first, last = list(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def power(value: str) -> str:
    """Return a learning rate as `1e-4`."""
    return f"{float(value):.0e}".replace("e-0", "e-")
