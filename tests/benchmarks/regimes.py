"""Simulated studies whose truth is known, in regimes where a claim is just wrong.

Answers come from one of two models, both with exactly the given accuracies:

- *copula*: a question has a difficulty that all cells share, one that a variant's cells share, and noise per cell, all
  normal. Answers change in both directions.
- *one way*: training only adds right answers, and quantization only breaks some of them.

Questions may come in clusters whose questions succeed and fail together, and the trained cells from several runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from scipy.special import ndtr, ndtri

from qrl import stats
from qrl.stats.simulate import BASE, BASE_Q, TRAINED, TRAINED_Q

Rates = tuple[float, float, float, float]
Weights = tuple[float, float, float, float]

GAIN: Weights = (-1, 1, 0, 0)
GAIN_Q: Weights = (0, 0, -1, 1)
SURVIVAL: Weights = (1, -1, -1, 1)
ENOUGH_QUESTIONS = 200  # below this, intervals of independent questions may cover more than they promise
FRAGILE = 0.5  # chance that a fragile answer breaks in a run: some breaks are shared by runs, some are not
CONCENTRATION = 32  # of the beta distribution of a cluster's share of broken answers, as in 20 templates of 50
_SPAN = 8.0  # standard deviations over which probabilities are integrated


@dataclass(frozen=True)
class Study:
    """A regime: true accuracies, how answers depend on each other, and how they are judged.

    Attributes:
        name: of the row.
        rates: true accuracies of base and trained at full precision, then of both under the scheme; over several runs
            the mean over all runs that there could be.
        n: questions of a run.
        margin: None for the default one.
        one_way: the model of the answers: *one way*, or *copula*.
        question: share of the latent variance that all cells of a question have in common.
        variant: share that the two cells of a variant have in common: the larger, the fewer answers change.
        few: few answers change, or all in one direction, so that intervals cover more than they promise.
        clusters: sizes of the clusters; empty if questions are independent.
        alike: share of each latent variance that the questions of a cluster have in common.
        runs: training runs.
        own_questions: each run has its own questions.
        copies: the runs are one run, entered several times.
        run_sd: latent standard deviations of a run's shift of both trained cells, and of the one under the scheme.
        collapse: chance that a run keeps nothing of its gain under the scheme.
        exception: why the bounds do not hold here; empty if they must.
    """

    name: str
    rates: Rates
    n: int
    margin: float | None = None
    one_way: bool = False
    question: float = 0.4
    variant: float = 0.4
    few: bool = False
    clusters: tuple[int, ...] = ()
    alike: float = 0.2
    runs: int = 1
    own_questions: bool = False
    copies: bool = False
    run_sd: tuple[float, float] = (0.0, 0.0)
    collapse: float = 0.0
    exception: str = ""

    def truth(self, weights: Weights) -> float:
        return float(np.dot(weights, self.rates))

    @property
    def gain(self) -> float:
        return self.truth(GAIN)

    @property
    def kept(self) -> float | None:
        """The true share of the gain that is kept; None if there is no gain."""
        return self.truth(GAIN_Q) / self.gain if self.gain > 1e-9 else None

    @property
    def is_independent(self) -> bool:
        """Whether the study is one run on independent questions, so that counts of combinations tell all."""
        return self.runs == 1 and not self.clusters

    @property
    def may_cover_more(self) -> bool:
        """Whether intervals are conservative by design."""
        return not self.is_independent or self.few or self.n < ENOUGH_QUESTIONS

    @property
    def wrong_words(self) -> list[str]:
        """The verdicts that are wrong in this regime, at the boundary included."""
        tiny = 1e-9  # rounding
        margin = max(0.01, 0.1 * self.gain) if self.margin is None else self.margin
        loss = -self.truth(SURVIVAL)
        wrong = []
        if self.kept is None or self.kept >= 0.5 - tiny:
            wrong.append("lost")
        if loss >= margin - tiny or self.truth(GAIN_Q) <= tiny:
            wrong.append("survives")
        if loss <= tiny:
            wrong.append("reduced")
        return wrong

    @cached_property
    def patterns(self) -> tuple[np.ndarray, np.ndarray]:
        """The (4, 16) combinations of outcomes, and (16,) the probability of each."""
        outcomes = np.array(np.meshgrid(*[[0.0, 1.0]] * 4, indexing="ij")).reshape(4, -1)
        probabilities = _one_way_probabilities if self.one_way else _copula_probabilities
        return outcomes, probabilities(self, outcomes)

    def draw(self, rng: np.random.Generator) -> Answers:
        """Return one study's answers."""
        if self.is_independent:
            outcomes, probabilities = self.patterns
            counts = rng.multinomial(self.n, probabilities)
            seen = counts > 0
            return Answers([outcomes[:, seen]], counts[seen])
        if self.clusters:
            index = np.repeat(np.arange(len(self.clusters)), self.clusters)
        else:
            index = np.arange(self.n)
        outcomes = _draw_one_way(self, index, rng) if self.one_way else _draw_copula(self, index, rng)
        if self.copies:
            outcomes = outcomes[:1] * self.runs
        step = int(index.max()) + 1 if self.own_questions else 0
        return Answers(outcomes, groups=[index + step * run for run in range(self.runs)])


@dataclass(frozen=True)
class Answers:
    """The answers of one study.

    Attributes:
        outcomes: per run (4, k) right or wrong, column j being the same question in every cell.
        counts: (k,) questions with the outcomes of a column; None if each column is one question.
        groups: per run (k,) the number of each question, or of its cluster; empty for one run of independent questions.
    """

    outcomes: list[np.ndarray]
    counts: np.ndarray | None = None
    groups: list[np.ndarray] | None = None

    def contrast(self, weights: Weights) -> stats.Estimate:
        """Return a weighted sum of the cells' accuracies, as `compare` computes it."""
        if self.groups is None:
            return stats.contrast(self.outcomes[0], weights, counts=self.counts)
        if len(self.outcomes) == 1:
            return stats.contrast(self.outcomes[0], weights, self.groups[0])
        labels = [str(run) for run in range(len(self.outcomes))]
        return stats.contrast_over_runs(self.outcomes, weights, self.groups, labels, self.n)

    @cached_property
    def n(self) -> int:
        """Distinct questions."""
        if self.counts is not None:
            return int(self.counts.sum())
        shared = len(self.outcomes) > 1 and np.array_equal(self.groups[0], self.groups[1])
        return sum(run.shape[1] for run in self.outcomes[: 1 if shared else None])

    @property
    def accuracies(self) -> np.ndarray:
        """(4,) of the cells, averaged over runs."""
        return np.mean([np.average(run, axis=1, weights=self.counts) for run in self.outcomes], axis=0)


def _one_way_probabilities(study: Study, outcomes: np.ndarray) -> np.ndarray:
    base, trained, base_q, trained_q = study.rates
    before_and_after = np.array([[1 - trained, trained - base], [0.0, base]])
    base_kept = base_q / base if base else 0.0
    trained_kept = trained_q / trained if trained else 0.0
    found = []
    for b, t, b_q, t_q in outcomes.astype(int).T:
        of_base = (base_kept if b_q else 1 - base_kept) if b else 1 - b_q
        of_trained = (trained_kept if t_q else 1 - trained_kept) if t else 1 - t_q
        found.append(before_and_after[b, t] * of_base * of_trained)
    return np.array(found)


def _copula_probabilities(study: Study, outcomes: np.ndarray) -> np.ndarray:
    """Integrate over what all cells of a question share, and over what a variant's cells share."""
    difficulty, variant = np.linspace(-_SPAN, _SPAN, 201), np.linspace(-_SPAN, _SPAN, 2001)
    weight, variant_weight = (np.exp(-(grid**2) / 2) / np.exp(-(grid**2) / 2).sum() for grid in (difficulty, variant))
    both = math.sqrt(study.question) * difficulty[:, None] + math.sqrt(study.variant) * variant
    noise = math.sqrt(1 - study.question - study.variant)
    pairs = {}  # (full, quantized) cell → by their outcomes, the (201,) chance at each difficulty
    for full, quantized in ((BASE, BASE_Q), (TRAINED, TRAINED_Q)):
        right = [ndtr((ndtri(study.rates[cell]) - both) / noise) for cell in (full, quantized)]
        for a in (0, 1):
            for b in (0, 1):
                chance = (right[0] if a else 1 - right[0]) * (right[1] if b else 1 - right[1])
                pairs[full, a, b] = chance @ variant_weight
    found = [(pairs[BASE, b, b_q] * pairs[TRAINED, t, t_q]) @ weight for b, t, b_q, t_q in outcomes.astype(int).T]
    return np.maximum(found, 0) / np.sum(np.maximum(found, 0))


def _draw_copula(study: Study, index: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Return (4, n) outcomes per run; on shared questions the base's are the same in every run."""
    groups = int(index.max()) + 1

    def factor(*shape: int) -> np.ndarray:
        """Return standard normal values for each question, alike in a cluster."""
        own = rng.standard_normal((*shape, study.n))
        if not study.clusters:
            return own
        of_clusters = rng.standard_normal((*shape, groups))[..., index]
        return math.sqrt(study.alike) * of_clusters + math.sqrt(1 - study.alike) * own

    def of_variant(thresholds: np.ndarray, difficulty: np.ndarray) -> np.ndarray:
        """Return (2, n) a variant's outcomes at full precision and under the scheme."""
        noise = math.sqrt(1 - study.question - study.variant) * factor(2)
        return (difficulty + math.sqrt(study.variant) * factor() + noise < thresholds[:, None]).astype(float)

    base, trained, base_q, trained_q = study.rates
    healthy = (trained_q - study.collapse * base_q) / (1 - study.collapse)
    of_both, of_quantized = study.run_sd
    # Wider thresholds, so that the mean over runs is the rate that was put in.
    thresholds = ndtri([trained, healthy]) * np.sqrt([1 + of_both**2, 1 + of_both**2 + of_quantized**2])
    runs = []
    difficulty = base_outcomes = None
    for _ in range(study.runs):
        if difficulty is None or study.own_questions:
            difficulty = math.sqrt(study.question) * factor()
            base_outcomes = of_variant(ndtri([base, base_q]), difficulty)
        shift = of_both * rng.standard_normal()
        of_run = thresholds + shift + np.array([0, of_quantized * rng.standard_normal()])
        if rng.random() < study.collapse:
            of_run[1] = ndtri(base_q)
        trained_outcomes = of_variant(of_run, difficulty)
        runs.append(np.stack([base_outcomes[0], trained_outcomes[0], base_outcomes[1], trained_outcomes[1]]))
    return runs


def _draw_one_way(study: Study, index: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Return (4, n) outcomes per run. The base changes nowhere; which answers training adds is the same in all runs."""
    base, trained, _, trained_q = study.rates
    luck, loss = rng.random(study.n), 1 - trained_q / trained
    if study.clusters:
        of_clusters = rng.beta(loss * CONCENTRATION, (1 - loss) * CONCENTRATION, len(study.clusters))
        chance = of_clusters[index]
    else:
        chance = FRAGILE * (rng.random(study.n) < loss / FRAGILE)
    before, after = (luck < base).astype(float), (luck < trained).astype(float)
    return [np.stack([before, after, before, after * (rng.random(study.n) >= chance)]) for _ in range(study.runs)]


def rows() -> list[Study]:
    """Return the regimes of the table."""
    return [*_one_run(), *_few_changes(), *_at_the_edge(), *_clustered(), *_several_runs(), *_not_normal()]


def _one_run() -> list[Study]:
    rarely = {"question": 0.2, "variant": 0.78}  # few answers change
    half, tenth, none = (0.60, 0.80, 0.60, 0.70), (0.60, 0.80, 0.60, 0.78), (0.60, 0.80, 0.60, 0.80)
    return [
        Study("nothing gained", (0.65, 0.65, 0.63, 0.63), 500),
        Study("gain 0.20, none lost", none, 200),
        Study("gain 0.20, a tenth lost", tenth, 1000),
        Study("gain 0.20, a tenth lost, few answers change", tenth, 1000, **rarely),
        Study("gain 0.20, a tenth lost", tenth, 5000),
        Study("gain 0.20, half lost", half, 500),
        Study("gain 0.20, half lost, few answers change", half, 500, **rarely),
        Study("gain 0.20, 0.02 lost, the base loses too", (0.60, 0.80, 0.55, 0.73), 2000),
        Study("gain 0.15, margin 0.03 lost", (0.60, 0.75, 0.58, 0.70), 500, margin=0.03),
        Study("gain 0.10, 0.01 lost: where the margins meet", (0.60, 0.70, 0.60, 0.69), 5000, **rarely),
        Study("gain 0.04, 0.01 lost", (0.60, 0.64, 0.60, 0.63), 5000, **rarely),
        Study("gain 0.04, none lost", (0.60, 0.64, 0.60, 0.64), 1000),
        Study("gain 0.03, all lost", (0.60, 0.63, 0.60, 0.60), 2000),
        Study("gain 0.02, 0.01 lost: half, and the margin", (0.60, 0.62, 0.60, 0.61), 5000, **rarely),
        Study("gain 0.01, all lost", (0.60, 0.61, 0.60, 0.60), 5000, **rarely),
        Study("gain 0.40, a tenth lost", (0.30, 0.70, 0.30, 0.66), 100),
        Study("gain 0.40, a tenth lost", (0.30, 0.70, 0.30, 0.66), 20),
        Study("gain 0.40, half lost", (0.30, 0.70, 0.30, 0.50), 20),
        Study("gain 0.40, none lost", (0.30, 0.70, 0.30, 0.70), 20),
    ]


def _few_changes() -> list[Study]:
    one_way = {"one_way": True, "few": True}
    tenth, none = (0.60, 0.80, 0.60, 0.78), (0.60, 0.80, 0.60, 0.80)
    return [
        Study("gain 0.20, none lost, 1 answer in 70 changes", none, 500, question=0.2, variant=0.798, few=True),
        Study("one way, gain 0.20, a tenth lost", tenth, 100, **one_way),
        Study("one way, gain 0.20, a tenth lost", tenth, 300, **one_way),
        Study("one way, gain 0.20, a tenth lost", tenth, 1000, **one_way),
        Study("one way, gain 0.20, a tenth lost", tenth, 5000, **one_way),
        Study("one way, gain 0.10, margin 0.02 lost", (0.60, 0.70, 0.60, 0.68), 300, 0.02, **one_way),
        Study("one way, gain 0.20, half lost", (0.60, 0.80, 0.60, 0.70), 100, **one_way),
        Study("one way, gain 0.04, half lost", (0.60, 0.64, 0.60, 0.62), 1000, **one_way),
        Study("one way, gain 0.04, 0.01 lost", (0.60, 0.64, 0.60, 0.63), 500, **one_way),
        Study("one way, gain 0.01, all lost", (0.60, 0.61, 0.60, 0.60), 1000, **one_way),
        Study("one way, gain 0.01, all lost", (0.60, 0.61, 0.60, 0.60), 5000, **one_way),
        Study("one way, gain 0.40, a tenth lost", (0.30, 0.70, 0.30, 0.66), 20, **one_way),
    ]


def _at_the_edge() -> list[Study]:
    return [
        Study("floor, 0.01 to 0.03, half lost", (0.01, 0.03, 0.01, 0.02), 1000, few=True),
        Study("floor, 0.02 to 0.22, base falls to 0, half lost", (0.02, 0.22, 0.00, 0.10), 500, few=True),
        Study("floor, 0.02 to 0.10, a collapse to 0.02", (0.02, 0.10, 0.02, 0.02), 500, few=True),
        Study("ceiling, 0.78 to 0.98, a tenth lost", (0.78, 0.98, 0.78, 0.96), 1000, few=True),
        Study("ceiling, 0.90 to 0.99, 0.01 lost", (0.90, 0.99, 0.90, 0.98), 2000, few=True),
        Study("ceiling, 0.70 to 0.96, none lost", (0.70, 0.96, 0.70, 0.96), 1000, few=True),
    ]


def _clustered() -> list[Study]:
    templates, unequal = (50,) * 20, (500, *(8,) * 60)
    tenth, half, none = (0.60, 0.80, 0.60, 0.78), (0.60, 0.80, 0.60, 0.70), (0.60, 0.80, 0.60, 0.80)
    one_way = partial(Study, rates=tenth, n=1000, one_way=True)
    unequally = "few clusters, which lose unequally"
    return [
        Study("20 clusters of 50, a tenth lost", tenth, 1000, clusters=templates),
        Study("20 clusters of 50, half lost", half, 1000, clusters=templates),
        Study("20 clusters of 50, none lost", none, 1000, clusters=templates),
        one_way("10 clusters of 100, one way, a tenth lost", clusters=(100,) * 10, exception=unequally),
        one_way("20 clusters of 50, one way, a tenth lost", clusters=templates, exception=unequally),
        one_way("100 clusters of 10, one way, a tenth lost", clusters=(10,) * 100),
        Study("20 clusters of 50, one way, half lost", half, 1000, one_way=True, clusters=templates),
        Study("a cluster of 500, 60 of 8, a tenth lost", tenth, 980, clusters=unequal),
        Study("a cluster of 500, 60 of 8, half lost", half, 980, clusters=unequal),
        Study("a cluster of 500, 60 of 8, little alike, half lost", half, 980, clusters=unequal, alike=0.02),
        Study("a cluster of 500, 60 of 8, one way, a tenth lost", tenth, 980, one_way=True, clusters=unequal),
        Study("8 clusters of 25, half lost", half, 200, clusters=(25,) * 8),
        Study("100 clusters of 5, a tenth lost", tenth, 500, clusters=(5,) * 100),
    ]


def _several_runs() -> list[Study]:
    tenth, half = (0.60, 0.80, 0.60, 0.78), (0.60, 0.80, 0.60, 0.70)
    usual, far = (0.08, 0.06), (0.3, 0.2)
    found = [Study("half lost", half, 500, runs=runs, run_sd=usual) for runs in (2, 3, 5, 10)]
    found += [Study("a tenth lost", tenth, 500, runs=runs, run_sd=usual) for runs in (2, 3, 5, 10)]
    found += [Study("one way, a tenth lost", tenth, 1000, one_way=True, runs=runs) for runs in (2, 3, 5)]
    return [
        *found,
        Study("half lost, each run has its own questions", half, 500, runs=3, own_questions=True, run_sd=usual),
        Study("half lost, runs far apart", half, 500, runs=3, run_sd=far),
        Study("a tenth lost, runs far apart", tenth, 500, runs=5, run_sd=far),
        Study("the same run entered again, a tenth lost", tenth, 500, runs=3, copies=True),
        Study("the same run entered again, one way, a tenth lost", tenth, 300, one_way=True, runs=3, copies=True),
        Study("the same run entered again, one way, a tenth lost", tenth, 1000, one_way=True, runs=3, copies=True),
        Study("20 clusters of 25, half lost", half, 500, clusters=(25,) * 20, runs=3, run_sd=usual),
    ]


def _not_normal() -> list[Study]:
    draw = partial(
        Study,
        "one run in five keeps none of its gain",
        (0.60, 0.80, 0.60, 0.76),
        2000,
        question=0.2,
        variant=0.78,
        collapse=0.2,
        exception="runs are not normal",
    )
    return [draw(runs=runs) for runs in (2, 3, 5, 10)]
