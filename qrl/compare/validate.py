"""What a table of outcomes must hold before any statistic is computed from it.

Cells may be subtracted if one engine answered them, with weights quantized in one way. `evaluate` records both in two
columns, `engine` and `settings_digest`; tables without them are not checked.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from qrl import names
from qrl.errors import BadInput
from qrl.formats import groups
from qrl.names import BASE, FULL, cell_name

COLUMNS = ("variant", "scheme", "question", "correct")
LABEL = re.compile(r"(?=.{1,200}\Z)[\w.+-]+( [\w.+-]+)*")  # labels appear in metric names and tables
OUTCOMES = {"false": 0.0, "true": 1.0}
OF_SETTINGS = (names.SETTINGS, names.PROMPT_HASH, names.GROUP_SIZE, names.LAYERS)
OPTIONAL = ("seed", "cluster", "sample", names.ENGINE, names.DTYPE, *OF_SETTINGS)
LABEL_RULE = "expected letters, digits, spaces and . _ + -, 200 at most"
ENOUGH = "expected at least 2, and hundreds for a verdict"
_NESTED = (list, dict, set, tuple, np.ndarray)


def check_grid(cells: Mapping[tuple[str, str], Any], n: int, *, whole: bool = True) -> None:
    """Reject cells that no gain can be computed from: base and full are needed, and each variant under each scheme.

    Args:
        cells: by variant and scheme.
        n: questions.
        whole: whether each variant is needed under each scheme.

    Raises:
        BadInput: a label is malformed, a cell is missing, or n < 2.
    """
    variants = dict.fromkeys(variant for variant, _ in cells)
    schemes = dict.fromkeys(scheme for _, scheme in cells)
    for label in (*variants, *schemes):
        if not LABEL.fullmatch(label):
            raise BadInput(f"'{label}' is not a valid label for a variant or scheme: {LABEL_RULE}.")
    if BASE not in variants:
        measured = f"The variants are {quoted(variants)}, but gains are measured from '{BASE}'"
        raise BadInput(f"{measured}: give the untrained variant that name.")
    if len(variants) == 1:
        raise BadInput(f"'{BASE}' is the only variant: a comparison needs a trained one beside it.")
    if FULL not in schemes:
        measured = f"The schemes are {quoted(schemes)}, but gain survival is measured from '{FULL}'"
        raise BadInput(f"{measured}: give the full-precision scheme that name, or name it with --reference.")
    if whole:
        for cell in product(variants, schemes):
            if cell not in cells:
                raise BadInput(
                    f"Cell {cell_name(*cell)} is missing: every variant ({quoted(variants)}) is needed under every "
                    f"scheme ({quoted(schemes)})."
                )
    if n < 2:
        raise BadInput(f"There is {n} question, which gives no error bar: {ENOUGH}.")


def check_columns(frame: pd.DataFrame) -> None:
    """Reject a table that lacks the columns every comparison reads, or has empty values in them.

    Raises:
        BadInput: a column is missing, a required value is empty, or a value is a list or an object.
    """
    missing = [column for column in COLUMNS if column not in frame]
    if missing:
        present = ", ".join(map(str, frame.columns))[:300] or "none"
        expected = f"expected {quoted(COLUMNS)}, or other names for them in --columns {missing[0]}=NAME"
        raise BadInput(f"The table of outcomes lacks {quoted(missing)} among its columns {present}: {expected}.")
    if frame.empty:
        raise BadInput("The table of outcomes is empty: expected a row per cell and question.")
    for column in frame.columns.intersection([*COLUMNS, *OPTIONAL], sort=False):
        nested = [value for value in _objects(pd.Series(frame[column])) if isinstance(value, _NESTED)]
        if nested:
            nested_values = f"The column '{column}' holds values such as {str(nested[0])[:40]!r}"
            raise BadInput(f"{nested_values}, but every value must be one label or number: write it as text.")
    for column in COLUMNS:
        empty = np.count_nonzero(frame[column].isna())
        if empty:
            problem = f"The column '{column}' has {empty} empty values: every row needs {quoted(COLUMNS)}"
            if column == "correct":
                problem += "; `--missing wrong` counts answers without an outcome as wrong"
            raise BadInput(f"{problem}.")


def _objects(column: pd.Series) -> Iterable[Any]:
    """Return a column's values, each once if that is known, and none if its dtype holds only texts or numbers."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.categories
    if isinstance(column.dtype, pd.StringDtype) or column.dtype.kind in "biufmM":
        return ()
    return column


def labels(column: pd.Series) -> pd.Series:
    """Return a column's values as text: a categorical with sorted categories, so that each text is made once."""
    if column.dtype == object:
        column = column.astype(str)  # 1, 1.0 and True are equal, but no equal texts
    codes, distinct = pd.factorize(column)
    texts = pd.Categorical(pd.Index(distinct).astype(object).astype(str))
    coded = pd.Categorical.from_codes(texts.codes[codes], dtype=texts.dtype)
    return pd.Series(coded, index=column.index, name=column.name)


def cells_of(frame: pd.DataFrame) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Return for each row the index of its cell, and the cells (variant, scheme) in the order of their first rows."""
    variants = labels(pd.Series(frame["variant"])).cat
    schemes = labels(pd.Series(frame["scheme"])).cat
    count = len(schemes.categories)
    codes = variants.codes.to_numpy(dtype=np.int64) * count + schemes.codes.to_numpy()  # one number for a pair
    cell_of_row, distinct = pd.factorize(codes)
    cells = [(variants.categories[code // count], schemes.categories[code % count]) for code in distinct]
    return cell_of_row, cells


def read_outcomes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that outcomes are read from, numbered anew.

    variant, scheme, question and seed are categoricals of texts, sorted; `seed` is empty if there is none.

    Raises:
        BadInput: as `check_columns` and `check_compatible`; an outcome is outside 0..1, or a row is duplicated.
    """
    check_columns(frame)
    frame = frame.reset_index(drop=True)  # tables that were concatenated repeat their labels
    texts = labels(pd.Series(frame["correct"])).cat
    correct = _shares(texts.categories)[texts.codes]
    invalid = frame.loc[np.isnan(correct), "correct"].astype(object).tolist()
    if invalid:
        problem = f"'correct' is {invalid[0]!r:.40} in {len(invalid)} row(s)"
        expected = "must be 0 or 1, or a partial credit between them"
        raise BadInput(f"{problem}, but {expected}: grade the completions first, or name another column.")

    table = frame.filter(items=[*COLUMNS, "cluster", "sample"]).assign(correct=correct)
    table = table.assign(**{column: labels(pd.Series(frame[column])) for column in ("variant", "scheme", "question")})
    check_compatible(frame)
    seeds = seed_labels(pd.Series(frame["seed"])) if "seed" in frame else pd.Series("", index=frame.index)
    table["seed"] = labels(seeds)

    key = [column for column in ("variant", "scheme", "seed", "question", "sample") if column in table]
    duplicates = pd.DataFrame(table[table.duplicated(subset=key)])
    if len(duplicates):
        row = duplicates.iloc[0]
        raise BadInput(
            f"Cell {cell_name(row.variant, row.scheme)} answers question '{row.question}' more than once "
            f"({len(duplicates)} "
            "such rows in all): expected one row per cell and question. Mark training runs in a column 'seed', and "
            "several answers to one question in a column 'sample'; --where COLUMN=VALUE keeps some rows only."
        )
    return table


def _shares(texts: pd.Index) -> np.ndarray:
    """Return outcomes as numbers from 0 to 1; NaN for any other text."""
    lower = texts.str.lower()
    parsed = pd.Series(pd.to_numeric(pd.Series(lower, dtype=object), errors="coerce"), dtype=float)
    booleans = pd.Series(lower.map(OUTCOMES), dtype=float)
    numbers = parsed.fillna(booleans).to_numpy()
    return np.where((numbers >= 0) & (numbers <= 1), numbers, np.nan)


def seed_labels(seeds: pd.Series) -> pd.Series:
    """Return seeds as text; whole numbers stay whole even if empty values made the column float."""
    # Unless values are objects, equal ones have equal texts, so each distinct value is written once.
    if seeds.dtype != object and seeds.duplicated().any():
        codes, distinct = pd.factorize(seeds, use_na_sentinel=False)
        texts = pd.Categorical(seed_labels(pd.Series(pd.Index(distinct))))
        return pd.Series(texts.take(codes), index=seeds.index)

    numbers = pd.Series(pd.to_numeric(seeds.astype(str), errors="coerce"), dtype=float)
    is_whole = (numbers.abs() < 2**53) & (numbers % 1 == 0)
    integers = numbers.where(is_whole, 0).astype("int64")
    text = seeds.astype(object).where(~is_whole, integers).where(seeds.notna(), "").astype(str)

    # "1" and "01" would become one run in silence.
    spelled = pd.Series(seeds[[isinstance(seed, str) for seed in seeds]])
    for spellings in spelled.groupby(text).unique():
        if len(spellings) > 1:
            raise BadInput(
                f"The seeds {quoted(sorted(spellings))} are the same number: use one spelling for one training run, "
                "and different numbers for different runs."
            )
    return text


def check_compatible(frame: pd.DataFrame) -> None:
    """Reject cells that differ in more than their training.

    Args:
        frame: columns variant, scheme, and optionally seed, engine, settings_digest, and question with prompt_hash.

    Raises:
        BadInput: there are two engines, a question was put in two ways, or a scheme was applied in two ways within one
            training run.
    """
    engine(frame)
    _check_prompts(frame)
    if names.SETTINGS in frame:
        _check_settings(frame)


def _check_prompts(frame: pd.DataFrame) -> None:
    """Reject a table in which a question was put in two ways."""
    prompts = pd.DataFrame(frame.reindex(columns=["question", names.PROMPT_HASH]))
    # Most tables have no hash or one; only others are worth the search.
    if len(pd.Series(prompts[names.PROMPT_HASH]).dropna().unique()) < 2:
        return
    if prompts.dropna().drop_duplicates()["question"].duplicated().any():
        raise BadInput(
            "Some cells got the same questions in another prompt or with other chat.template_kwargs, so a difference "
            "would not measure the models alone: evaluate all with the same ones."
        )


def _check_settings(frame: pd.DataFrame) -> None:
    """Reject a table in which a scheme was applied in two ways within one training run."""
    columns = ["variant", "scheme", names.SETTINGS, "seed"]
    cells = pd.DataFrame(frame.reindex(columns=columns)).drop_duplicates()
    cells = cells.astype(object).fillna("").astype(str).rename(columns={names.SETTINGS: "settings"})
    is_base = cells["variant"] == BASE
    trained_cells = cells[~is_base]
    for scheme, seed in sorted(set(zip(trained_cells["scheme"], trained_cells["seed"], strict=True))):
        trained = trained_cells[(trained_cells["scheme"] == scheme) & (trained_cells["seed"] == seed)]
        base = cells[is_base & (cells["scheme"] == scheme)]
        base_of_seed = base[base["seed"] == seed]
        if len(base_of_seed):  # otherwise the base's answers under other seeds serve this run too
            base = base_of_seed
        if len(set(trained["settings"]) | set(base["settings"])) > 1:
            under_seed = f" and seed {seed}" if seed else ""
            raise BadInput(
                f"The cells of scheme {scheme}{under_seed} were not stored in the same way: "
                "settings, libraries or calibration questions differ, or are unknown for one of them, so their "
                "difference would not measure training alone. Quantize all variants in one `quantize --scheme … "
                "--models base=…,grpo=…` and evaluate again."
            )


def engine(frame: pd.DataFrame) -> str:
    """Return the engine that answered every row, such as "vllm 0.31.0"; empty if that is unknown for some rows.

    Raises:
        BadInput: there are several engines, or several versions of one: their arithmetic differs. Rows without a
            version match any version.
    """
    if names.ENGINE not in frame:
        return ""
    engines = sorted(set(map(str, frame[names.ENGINE].dropna().unique())))
    programs = {engine.partition(" ")[0] for engine in engines}
    versions = {engine.partition(" ")[2] for engine in engines} - {""}
    if len(programs) > 1 or len(versions) > 1:
        raise BadInput(
            f"The cells were answered by different engines ({', '.join(engines)}) with different arithmetic, so they "
            "cannot be compared: evaluate all of them with one evaluate.engine."
        )
    if bool(frame[names.ENGINE].isna().any()):
        return ""
    return max(engines, key=len, default="")  # the one with a version, if any row has it


def full_with_dtype(frame: pd.DataFrame) -> str:
    """Return how tables show the scheme `full`: `full (fp32)` if all its rows name that one dtype, else `full`."""
    dtypes = frame.loc[frame["scheme"] == FULL, names.DTYPE].unique() if names.DTYPE in frame else ()
    return names.shown(FULL, dtypes)


def unusual_groups(frame: pd.DataFrame) -> dict[str, int]:
    """Return scheme → how many inputs share a scale, where the rows name one size, and not the usual one."""
    if names.GROUP_SIZE not in frame:
        return {}
    sizes = pd.DataFrame({"scheme": frame["scheme"], "size": pd.to_numeric(frame[names.GROUP_SIZE], errors="coerce")})
    sizes = sizes.dropna().drop_duplicates().astype({"scheme": str, "size": int})
    unusual = {}
    for scheme, scheme_sizes in sizes.groupby("scheme")["size"]:
        if len(scheme_sizes) == 1 and scheme_sizes.iloc[0] != groups.USUAL:
            unusual[str(scheme)] = int(scheme_sizes.iloc[0])
    return unusual


def partial_layers(frame: pd.DataFrame) -> dict[str, str]:
    """Return scheme → which linears it stores in few bits, where the rows name one selection of them."""
    if names.LAYERS not in frame:
        return {}
    rows = frame[["scheme", names.LAYERS]].dropna().astype(str).drop_duplicates()
    selected = pd.DataFrame(rows[rows[names.LAYERS] != ""])
    partial = {}
    for scheme, selections in selected.groupby("scheme")[names.LAYERS]:
        if len(selections) == 1:
            partial[str(scheme)] = selections.iloc[0]
    return partial


def quoted(words: Iterable[str]) -> str:
    """Return words as a list for an error sentence: `'a', 'b'`."""
    return ", ".join(f"'{word}'" for word in words)
