"""Outcomes of all cells, aligned by question and training run.

Labels are numbers here: each row has a number for its cell, its seed and its question, so that a table of a million
questions in twelve cells is sorted once, by one number a row. Rows of the same number are the samples of one *answer*.
All answers of one training run are then put into a matrix with a row per cell and a column per question; a gap in it is
a question that a cell did not answer, and the comparison is refused.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from qrl.compare.evidence import Cell, Questions
from qrl.compare.validate import ENOUGH, LABEL, LABEL_RULE, cells_of, check_grid, labels, quoted, read_outcomes
from qrl.errors import BadInput
from qrl.names import BASE, cell_name
from qrl.stats.rates import is_binary

MISSING_ANSWERS = "qrl_filled"  # attribute of a frame: cell → how many of its answers were missing


@dataclass(frozen=True)
class _Sorting:
    """The rows in the order of their answers.

    Attributes:
        key: (rows,) a number for each row's cell, seed and question.
        order: (rows,) the positions of rows, sorted by that number.
        starts: (answers,) where in `order` the samples of each answer start.
        samples: (answers,) how many samples each answer has.
    """

    key: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True)
class _Alignment:
    """What is the same whatever the values are: all of `Questions` but the values of its cells.

    `matrices` has per run (cells, questions) the index of each cell's answer to each question.
    """

    runs: tuple[str, ...]
    matrices: list[np.ndarray]
    groups: tuple[np.ndarray, ...]
    samples: dict[Cell, int]
    n: int
    clusters: int | None


class Answered:
    """A table of answers, checked, and for each row the cell, the training run and the question that it belongs to.

    The base is one model under every seed. If it was not evaluated under a run's seed, its answers to the same
    questions are taken from its rows without a seed, or else from the first other seed.

    Attributes:
        frame: as it was given, numbered anew: columns variant, scheme, question, correct, and optionally seed (training
            run), sample (of several answers to one question) and cluster (group of questions).
        table: from `validate.read_outcomes`.
        cells: in order; `cell` holds each row's index among them.
        questions: in order; `question` holds each row's index among them.
        grid: whether each variant is needed under each scheme.
    """

    def __init__(self, frame: pd.DataFrame, table: pd.DataFrame | None = None, *, grid: bool = True) -> None:
        self.grid = grid
        self.frame = frame.reset_index(drop=True)  # tables that were concatenated repeat their labels
        self.table = read_outcomes(self.frame) if table is None else table
        self.questions = self.table["question"].cat.categories  # sorted, as all categories here
        self.question = self.table["question"].cat.codes.to_numpy()

        cell_of_row, self.appeared = cells_of(self.table)
        self.cells: list[Cell] = sorted(self.appeared)
        sorted_index = np.array([self.cells.index(cell) for cell in self.appeared], dtype=np.int16)
        self.cell = sorted_index[cell_of_row]

    @property
    def missing_answers(self) -> dict[Cell, int]:
        """Cell → answers that were missing and count as wrong, where `missing.fill` added them."""
        return self.frame.attrs.get(MISSING_ANSWERS, {})

    @cached_property
    def sampled(self) -> np.ndarray:
        """The indices of the cells that answer a question several times."""
        cell, _, _ = self._answers
        return np.unique(cell[self._sorting.samples > 1])

    @cached_property
    def outcomes(self) -> Questions:
        """The cells' outcomes; raises BadInput if the cells are not comparable."""
        return replace(self.read(pd.Series(self.table["correct"])), partial=self.partial)

    @cached_property
    def partial(self) -> bool:
        """Whether an answer has partial credit, between 0 and 1."""
        return not is_binary(self.table["correct"].to_numpy())

    def read(self, values: pd.Series) -> Questions:
        """Return cells' values, one a row in 0..1, averaged over a question's samples.

        Raises:
            BadInput: the cells are not comparable.
        """
        alignment = self._alignment
        mean = self._mean(values)
        cells = {}
        for index, cell in enumerate(self.cells):
            cells[cell] = tuple(mean[matrix[index]] for matrix in alignment.matrices)
        return Questions(
            runs=alignment.runs,
            cells=cells,
            groups=alignment.groups,
            samples=alignment.samples,
            n=alignment.n,
            clusters=alignment.clusters,
            differing=self._differing(mean),
        )

    def known(self, values: pd.Series) -> "tuple[Answered, pd.Series]":
        """Return the table and the values without the questions for which any row lacks a value."""
        is_unknown = values.isna().to_numpy()
        if not is_unknown.any():
            return self, values
        keep = ~np.isin(self.question, self.question[is_unknown])
        frame = pd.DataFrame(self.frame[keep])
        table = pd.DataFrame(self.table[keep]).reset_index(drop=True)
        return Answered(frame, table, grid=self.grid), pd.Series(values[keep]).reset_index(drop=True)

    @cached_property
    def _sorting(self) -> _Sorting:
        seeds = self.table["seed"].cat
        key = self.cell.astype(np.int64) * len(seeds.categories) + seeds.codes.to_numpy()
        key = key * len(self.questions) + self.question
        order = np.argsort(key, kind="stable").astype(np.int32 if len(key) < 2**31 else np.int64)
        sorted_key = key[order]
        starts = np.flatnonzero(np.r_[True, sorted_key[1:] != sorted_key[:-1]])
        return _Sorting(key, order, starts, samples=np.diff(np.r_[starts, len(key)]))

    def _mean(self, values: pd.Series) -> np.ndarray:
        """Return the mean of each answer's samples."""
        numbers = values.to_numpy(dtype=float)
        if self._sorting.samples.max() == 1:
            return numbers[self._sorting.order]
        return np.asarray(pd.Series(numbers).groupby(self._sorting.key).mean())

    @cached_property
    def _answers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each answer's cell, seed and question, as numbers."""
        first_rows = self._sorting.order[self._sorting.starts]
        seeds = self.table["seed"].cat.codes.to_numpy()
        return self.cell[first_rows], seeds[first_rows], self.question[first_rows]

    @cached_property
    def _alignment(self) -> _Alignment:
        """The answers' indices by run, cell and question; raises BadInput if the cells are not comparable."""
        check_grid(dict.fromkeys(self.appeared), len(np.unique(self.question)), whole=self.grid)
        samples = self._samples()
        runs = self._runs()
        seeds = list(self.table["seed"].cat.categories)
        matrices = [self._matrix(seeds.index(run), run) for run in runs]

        _, _, question = self._answers
        questions_of_runs = [question[matrix[0]] for matrix in matrices]  # all cells have the same questions
        groups, clusters = self._groups(questions_of_runs)
        for run, run_groups in zip(runs, groups, strict=True):
            if len(np.unique(run_groups)) < 2:
                raise BadInput(f"Seed {run} has questions of one group only, which give no error bar: {ENOUGH}.")
        n = len(np.unique(np.concatenate(questions_of_runs)))
        return _Alignment(runs, matrices, groups, samples, n, clusters)

    def _samples(self) -> dict[Cell, int]:
        """Return each cell's answers per question, the same for all its questions."""
        cell, _, question = self._answers
        samples = self._sorting.samples
        largest = np.zeros(len(self.cells), dtype=np.int64)
        np.maximum.at(largest, cell, samples)
        incomplete = np.flatnonzero(samples < largest[cell])
        if len(incomplete):
            answer = incomplete[0]
            raise BadInput(
                f"Cell {cell_name(*self.cells[cell[answer]])} answers question '{self.questions[question[answer]]}' "
                f"{samples[answer]} time(s), others {largest[cell[answer]]} times: expected the same number of samples "
                "for every question of a cell. `--missing wrong` counts missing ones as wrong."
            )
        return {name: int(count) for name, count in zip(self.cells, largest, strict=True)}

    def _runs(self) -> tuple[str, ...]:
        """Return the seeds of the trained variants, the same in each of their cells; one empty label if none."""
        cell, seed, _ = self._answers
        seed_names = self.table["seed"].cat.categories
        seeds_of_cell: dict[Cell, set[str]] = {}
        for code in np.unique(cell.astype(np.int64) * len(seed_names) + seed):
            variant, scheme = self.cells[code // len(seed_names)]
            if variant != BASE:
                seeds_of_cell.setdefault((variant, scheme), set()).add(seed_names[code % len(seed_names)])

        all_seeds = set().union(*seeds_of_cell.values())
        for trained, seeds in seeds_of_cell.items():
            if "" in seeds and len(all_seeds) > 1:
                mixed = f"Cell {cell_name(*trained)} has answers without a seed beside others with one"
                raise BadInput(f"{mixed}: name the training run of every answer.")
            if seeds != all_seeds:
                lacks = f"lacks seed {quoted(sorted(all_seeds - seeds))} of {quoted(sorted(all_seeds))}"
                raise BadInput(
                    f"Cell {cell_name(*trained)} {lacks}: every trained cell is needed for every training run."
                )
        for label in all_seeds:
            if label and not LABEL.fullmatch(label):
                raise BadInput(f"'{label}' is no label for a seed: {LABEL_RULE}.")

        # Numbers by value, before texts.
        numbers = sorted(filter(str.isdecimal, all_seeds), key=lambda label: (int(label), label))
        return *numbers, *sorted(all_seeds.difference(numbers))

    def _matrix(self, seed_index: int, run: str) -> np.ndarray:
        """Return (cells, questions) the index of one run's answers, all cells on the same questions, sorted."""
        cell, seed, question = self._answers
        of_run = np.flatnonzero(seed == seed_index)
        questions = np.unique(question[of_run])
        matrix = np.full((len(self.cells), len(questions)), -1, dtype=np.int64)
        matrix[cell[of_run], np.searchsorted(questions, question[of_run])] = of_run

        # The base is one model: under schemes in which this run has no cell of the base, another seed's answers serve.
        cells_of_run = {self.cells[index] for index in np.unique(cell[of_run])}
        for index, (variant, scheme) in enumerate(self.cells):
            if variant == BASE and (BASE, scheme) not in cells_of_run:
                # In reverse, so that the first seed's answers overwrite later ones; rows without a seed are the first.
                lent = np.flatnonzero((cell == index) & np.isin(question, questions))[::-1]
                matrix[index, np.searchsorted(questions, question[lent])] = lent

        gaps = matrix < 0
        if gaps.any():
            worst = int(gaps.sum(axis=1).argmax())
            first_question = self.questions[questions[int(gaps[worst].argmax())]]
            under_seed = f" under seed {run}" if run else ""
            raise BadInput(
                f"Cell {cell_name(*self.cells[worst])} lacks {gaps[worst].sum()} of {len(questions)} questions"
                f"{under_seed}, '{first_question}' first: cells are compared on the same questions "
                "only. Answer them, or count them as wrong: `--missing wrong`, in Python missing='wrong'."
            )
        return matrix

    def _differing(self, mean: np.ndarray) -> dict[Cell, int]:
        """Return cell of the base → questions that it answers differently under different seeds."""
        cell, seed, question = self._answers
        base_indices = [index for index, (variant, _) in enumerate(self.cells) if variant == BASE]
        is_base = np.isin(cell, base_indices)
        if len(np.unique(seed[is_base])) < 2:
            return {}
        answers = pd.DataFrame({"cell": cell[is_base], "question": question[is_base], "mean": mean[is_base]})
        ranges = answers.groupby(["cell", "question"])["mean"].agg(["min", "max"])
        counts = Counter(index for index, _ in ranges.query("min != max").index)
        return {self.cells[index]: count for index, count in counts.items()}

    def _groups(self, questions_of_runs: Sequence[np.ndarray]) -> tuple[tuple[np.ndarray, ...], int | None]:
        """Return a number for each question of each run, or for its cluster; and how many clusters there are."""
        if "cluster" not in self.table or bool(self.table["cluster"].isna().all()):
            all_questions = np.unique(np.concatenate(questions_of_runs))
            return tuple(np.searchsorted(all_questions, questions) for questions in questions_of_runs), None

        codes, distinct = pd.factorize(self.table["cluster"])
        code_of_question = np.full(len(self.questions), -1)
        code_of_question[self.question[::-1]] = codes[::-1]  # in reverse, so that a question's first row decides
        is_ambiguous = (codes < 0) | (codes != code_of_question[self.question])
        if is_ambiguous.any():
            question = self.questions[self.question[is_ambiguous].min()]
            expected = "each question belongs to one group, the same in every cell"
            raise BadInput(f"Question '{question}' has no single cluster: {expected}.")
        if len(distinct) < 2:
            advice = "drop the column, or name the real groups"
            raise BadInput(f"All questions are in one cluster, which gives no error bar: {advice}.")

        # Clusters are numbered in the order of their names, so that the order of rows changes no result.
        cluster_names = labels(pd.Series(distinct)).cat
        cluster_of_question = cluster_names.codes.to_numpy(dtype=int)[code_of_question]
        clusters = tuple(cluster_of_question[questions] for questions in questions_of_runs)
        return clusters, len(cluster_names.categories)
