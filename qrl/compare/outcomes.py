"""Outcomes of all cells, aligned by question and training run.

Labels are numbers here: a table of a million questions in twelve cells is sorted once, by one number a row.
"""

from collections import Counter
from dataclasses import replace
from functools import cached_property

import numpy as np
import pandas as pd

from qrl.compare import missing
from qrl.compare.evidence import Cell, Questions
from qrl.compare.validate import ENOUGH, LABEL, LABEL_RULE, cells_of, check_grid, checked, labels, quoted
from qrl.errors import BadInput
from qrl.names import BASE, cell_name
from qrl.stats.rates import is_binary


class Answered:
    """A table of answers, checked, and where each row belongs: to which cell, training run and question.

    The base is one model under every seed. If it was not evaluated under a run's seed, its answers to the same
    questions are taken from its rows without a seed, or else from the first other seed.

    Attributes:
        frame: as it was given, numbered anew: columns variant, scheme, question, correct, and optionally seed (training
            run), sample (of several answers to one question) and cluster (group of questions).
        table: from `validate.checked`.
        cells: in order; `cell` holds each row's place among them.
        grid: whether each variant is needed under each scheme.
    """

    def __init__(self, frame: pd.DataFrame, table: pd.DataFrame | None = None, *, grid: bool = True) -> None:
        self.grid = grid
        self.frame = frame.reset_index(drop=True)  # tables that were concatenated repeat their labels
        self.table = checked(self.frame) if table is None else table
        self.questions = self.table["question"].cat.categories  # sorted, as all categories here
        self.question = self.table["question"].cat.codes.to_numpy()
        appeared, self.appeared = cells_of(self.table)
        self.cells: list[Cell] = sorted(self.appeared)
        self.cell = np.array([self.cells.index(cell) for cell in self.appeared], dtype=np.int16)[appeared]

    @property
    def filled(self) -> dict[Cell, int]:
        """Cell → answers that were missing and count as wrong, where `missing.filled` added them."""
        return self.frame.attrs.get(missing.FILLED, {})

    @cached_property
    def sampled(self) -> np.ndarray:
        """The places of the cells that answer a question several times."""
        return np.unique(self._answers[0][self._sorted[3] > 1])

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
        runs, at, groups, samples, n, clusters = self._aligned
        mean = self._mean(values)
        cells = {cell: tuple(mean[run[place]] for run in at) for place, cell in enumerate(self.cells)}
        return Questions(runs, cells, groups, samples, n, clusters, self._differing(mean))

    def known(self, values: pd.Series) -> "tuple[Answered, pd.Series]":
        """Return the table without the questions of which a row has no value, and the values that are left."""
        unknown = values.isna().to_numpy()
        if not unknown.any():
            return self, values
        keep = ~np.isin(self.question, self.question[unknown])
        frame, table = pd.DataFrame(self.frame[keep]), pd.DataFrame(self.table[keep]).reset_index(drop=True)
        return Answered(frame, table, grid=self.grid), pd.Series(values[keep]).reset_index(drop=True)

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """A number per row for cell, seed and question; the rows' order by it; where each number starts and how many.

        Rows of one number are the samples of one answer.
        """
        seeds = self.table["seed"].cat
        key = self.cell.astype(np.int64) * len(seeds.categories) + seeds.codes.to_numpy()
        key = key * len(self.questions) + self.question
        order = np.argsort(key, kind="stable").astype(np.int32 if len(key) < 2**31 else np.int64)
        ordered = key[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        return key, order, starts, np.diff(np.r_[starts, len(key)])

    def _mean(self, values: pd.Series) -> np.ndarray:
        """Return the mean of each answer's samples."""
        key, order, _, size = self._sorted
        numbers = values.to_numpy(dtype=float)
        return numbers[order] if size.max() == 1 else np.asarray(pd.Series(numbers).groupby(key).mean())

    @cached_property
    def _answers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each answer's cell, seed and question, as numbers."""
        _, order, starts, _ = self._sorted
        rows = order[starts]
        return self.cell[rows], self.table["seed"].cat.codes.to_numpy()[rows], self.question[rows]

    @cached_property
    def _aligned(self) -> tuple:
        """What is the same whatever the values are: `runs` to `clusters` of `Questions`, `cells` as places of answers.

        Raises:
            BadInput: the cells are not comparable.
        """
        used = np.unique(self.question)
        check_grid(dict.fromkeys(self.appeared), len(used), whole=self.grid)
        samples, runs = self._samples(), self._runs()
        seeds = list(self.table["seed"].cat.categories)
        at = [self._places(seeds.index(run), run) for run in runs]
        asked = [self._answers[2][places[0]] for places in at]  # all cells have the same questions
        groups, clusters = self._groups(asked)
        for run, group in zip(runs, groups, strict=True):
            if len(np.unique(group)) < 2:
                raise BadInput(f"Seed {run} has questions of one group only, which give no error bar: {ENOUGH}.")
        return runs, at, groups, samples, len(np.unique(np.concatenate(asked))), clusters

    def _samples(self) -> dict[Cell, int]:
        """Return each cell's answers per question, the same for all its questions."""
        cell, _, question = self._answers
        size = self._sorted[3]
        most = np.zeros(len(self.cells), dtype=np.int64)
        np.maximum.at(most, cell, size)
        short = np.flatnonzero(size < most[cell])
        if len(short):
            first = short[0]
            raise BadInput(
                f"Cell {cell_name(*self.cells[cell[first]])} answers question '{self.questions[question[first]]}' "
                f"{size[first]} time(s), others {most[cell[first]]} times: expected the same number of samples for "
                "every question of a cell. `--missing wrong` counts missing ones as wrong."
            )
        return {each: int(count) for each, count in zip(self.cells, most, strict=True)}

    def _runs(self) -> tuple[str, ...]:
        """Return the seeds of the trained variants, the same in each of their cells; one empty label if none."""
        cell, seed, _ = self._answers
        seeds, count = self.table["seed"].cat.categories, len(self.table["seed"].cat.categories)
        by_cell: dict[Cell, set[str]] = {}
        for code in np.unique(cell.astype(np.int64) * count + seed):
            if (own := self.cells[code // count])[0] != BASE:
                by_cell.setdefault(own, set()).add(seeds[code % count])
        every = set().union(*by_cell.values())
        for own, there in by_cell.items():
            if "" in there and len(every) > 1:
                mixed = f"Cell {cell_name(*own)} has answers without a seed beside others with one"
                raise BadInput(f"{mixed}: name the training run of every answer.")
            if there != every:
                lacks = f"lacks seed {quoted(sorted(every - there))} of {quoted(sorted(every))}"
                raise BadInput(f"Cell {cell_name(*own)} {lacks}: every trained cell is needed for every training run.")
        for label in every:
            if label and not LABEL.fullmatch(label):
                raise BadInput(f"'{label}' is no label for a seed: {LABEL_RULE}.")
        numbers = sorted(filter(str.isdecimal, every), key=lambda label: (int(label), label))
        return *numbers, *sorted(every.difference(numbers))

    def _places(self, number: int, run: str) -> np.ndarray:
        """Return (cells, questions) the place of one run's answers, all cells on the same questions, sorted."""
        cell, seed, question = self._answers
        own = np.flatnonzero(seed == number)
        asked = np.unique(question[own])
        places = np.full((len(self.cells), len(asked)), -1, dtype=np.int64)
        places[cell[own], np.searchsorted(asked, question[own])] = own
        has_own = {self.cells[place][1] for place in np.unique(cell[own]) if self.cells[place][0] == BASE}
        for place, (variant, scheme) in enumerate(self.cells):
            if variant == BASE and scheme not in has_own:
                lent = np.flatnonzero((cell == place) & np.isin(question, asked))[::-1]  # rows without a seed count
                places[place, np.searchsorted(asked, question[lent])] = lent
        gaps = places < 0
        if gaps.any():
            worst = int(gaps.sum(axis=1).argmax())
            first = self.questions[asked[int(gaps[worst].argmax())]]
            raise BadInput(
                f"Cell {cell_name(*self.cells[worst])} lacks {gaps[worst].sum()} of {len(asked)} questions"
                f"{f' under seed {run}' if run else ''}, '{first}' first: cells are compared on the same questions "
                "only. Answer them, or count them as wrong: `--missing wrong`, in Python missing='wrong'."
            )
        return places

    def _differing(self, mean: np.ndarray) -> dict[Cell, int]:
        cell, seed, question = self._answers
        of_base = np.isin(cell, [place for place, (variant, _) in enumerate(self.cells) if variant == BASE])
        if len(np.unique(seed[of_base])) < 2:
            return {}
        answers = pd.DataFrame({"cell": cell[of_base], "question": question[of_base], "mean": mean[of_base]})
        ends = answers.groupby(["cell", "question"])["mean"].agg(["min", "max"])
        counts = Counter(cell for cell, _ in ends.query("min != max").index)
        return {self.cells[place]: count for place, count in counts.items()}

    def _groups(self, asked: list[np.ndarray]) -> tuple[tuple[np.ndarray, ...], int | None]:
        """Return a number for each question of each run, or for its cluster; and how many clusters there are."""
        if "cluster" not in self.table or bool(self.table["cluster"].isna().all()):
            every = np.unique(np.concatenate(asked))
            return tuple(np.searchsorted(every, run) for run in asked), None
        codes, distinct = pd.factorize(self.table["cluster"])
        of_question = np.full(len(self.questions), -1)
        of_question[self.question[::-1]] = codes[::-1]
        broken = self.question[(codes < 0) | (codes != of_question[self.question])]
        if len(broken):
            expected = "each question belongs to one group, the same in every cell"
            raise BadInput(f"Question '{self.questions[broken.min()]}' has no single cluster: {expected}.")
        if len(distinct) < 2:
            advice = "drop the column, or name the real groups"
            raise BadInput(f"All questions are in one cluster, which gives no error bar: {advice}.")
        named = labels(pd.Series(distinct)).cat
        numbers = named.codes.to_numpy(dtype=int)[of_question]
        return tuple(numbers[run] for run in asked), len(named.categories)
