"""Which linears of a model are stored in few bits, and in which format: the one answer to `quantize.layers`.

Training, storing, rollout engines and checks all ask `plan_of`, so that what is trained in few bits is stored in few
bits. `qrl.recipe.layers` has the spelling of its terms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from qrl.errors import BadInput
from qrl.formats.fakequant import linears
from qrl.recipe import layers as spelling
from qrl.recipe.layers import Term

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

# Linears that an engine fuses into one, which must therefore be stored alike; llm-compressor's FUSED_LAYER_NAMES.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")
_ATTENTION = re.compile(r"attention|attn")


@dataclass(frozen=True)
class LayerPlan:
    """Linears in few bits with their formats, and linears in full precision, by their names in the model."""

    formats: Mapping[str, str]  # linear → format, in the order of the model
    left_out: tuple[str, ...]  # the output head is not among them

    @property
    def by_format(self) -> dict[str, list[str]]:
        """Format → its linears."""
        linears_of: dict[str, list[str]] = {}
        for path, name in self.formats.items():
            linears_of.setdefault(name, []).append(path)
        return linears_of


def plan_of(model: PreTrainedModel, own: str, terms: Sequence[str] = (), field: str = "quantize.layers") -> LayerPlan:
    """Return which linears of a model are stored in few bits.

    Args:
        model: with or without weights.
        own: the format of linears that no term gives another: a scheme, or a format of `names.FORMATS`.
        terms: as `recipe.layers` spells them; none for all linears that `own` covers.
        field: the recipe's key, for errors.

    Raises:
        BadInput: as for `linears.covered`; a term matches no linear, or no linear is left in the format `own`. The
            sentence names the linears that there are.
    """
    covered = linears.covered(model, own)
    parsed = spelling.parse_all(tuple(terms))
    matcher = _Matcher(model, covered)
    matched = {term: matcher.matches(term, field) for term in parsed}
    included = [term for term in parsed if not (term.is_left_out or term.format)]

    formats = {}
    left_out = []
    for path in covered:
        matching = [term for term in parsed if path in matched[term]]
        named = next((term.format for term in matching if term.format), None)
        in_scope = named or not included or any(term in included for term in matching)
        if any(term.is_left_out for term in matching) or not in_scope:
            left_out.append(path)
        else:
            formats[path] = named or own
    if own not in formats.values():
        raise BadInput(
            f"{field} = {spelling.text_of(tuple(terms))} leaves none of {len(covered)} linears in {own}: leave a term "
            "out, or choose another format.",
            field=field,
        )
    return LayerPlan(formats, tuple(left_out))


def named(model: PreTrainedModel | nn.Module, paths: Iterable[str]) -> dict[str, nn.Linear]:
    """Return linears of a model by their paths, as `LayerPlan` lists them."""
    return {path: cast("nn.Linear", model.get_submodule(path)) for path in paths}


class _Matcher:
    """The linears of a model, and which of them a term matches."""

    def __init__(self, model: PreTrainedModel, covered: Mapping[str, nn.Linear]) -> None:
        self.paths = list(covered)
        self.block_of = {path: _block(path) for path in covered}
        self.blocks = 1 + max((block for block in self.block_of.values() if block is not None), default=-1)
        self.in_attention = {path for path in covered if _is_attention(model, path)}

    def matches(self, term: Term, field: str) -> set[str]:
        """Return the linears that a term matches; raise BadInput if there are none."""
        if term.blocks and term.blocks[1] > self.blocks:
            raise BadInput(f"{field} has {term.text}, but the model has {self.blocks} blocks.", field=field)
        found = {path for path in self.paths if self._is_match(term, path)}
        if not found:
            leaves = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in self.paths))
            raise BadInput(
                f"{field} has '{term.text}', which matches no linear of the model: expected {spelling.SPELLING}; its "
                f"{self.blocks} blocks hold {leaves}, such as {self.paths[0]}.{self._hint(term)}",
                field=field,
            )
        return found

    def _hint(self, term: Term) -> str:
        """Return a sentence on a regular expression that matches only later in the paths."""
        expression = term.pattern.removeprefix(spelling.REGEX)
        if expression == term.pattern or not any(re.search(expression, path) for path in self.paths):
            return ""
        return f" A regular expression matches from the start of the path: {spelling.REGEX}.*{expression}."

    def _is_match(self, term: Term, path: str) -> bool:
        block = self.block_of[path]
        if term.blocks:
            end, count = term.blocks
            if block is None:
                return False
            return block < count if end == spelling.FIRST else block >= self.blocks - count
        if term.pattern == spelling.ATTENTION:
            return path in self.in_attention
        if term.pattern == spelling.MLP:
            return block is not None and path not in self.in_attention
        if term.pattern.startswith(spelling.REGEX):  # matched from the start, as compressed-tensors and vLLM do
            return re.match(term.pattern.removeprefix(spelling.REGEX), path) is not None
        return f".{term.pattern}." in f".{path}."


def _block(path: str) -> int | None:
    """Return the number of a linear's decoder block; None outside of them."""
    number = _BLOCK.search(path)
    return int(number[1]) if number else None


def _is_attention(model: PreTrainedModel, path: str) -> bool:
    """Return whether a linear is part of attention, by its path or the class of the module that holds it."""
    parent = path.rpartition(".")[0]
    owner = type(model.get_submodule(parent)).__name__
    return bool(_ATTENTION.search(f"{parent} {owner}".lower()))


def _fused_with(path: str) -> list[str]:
    """Return the linears that an engine fuses into one with a linear, itself among them."""
    parent, _, leaf = path.rpartition(".")
    leaves = next((leaves for leaves in FUSED if leaf in leaves), (leaf,))
    return [f"{parent}.{name}" for name in leaves]


def fused_sets(paths: Iterable[str]) -> Iterator[list[str]]:
    """Yield the linears, of some, that an engine fuses into one; one linear alone is yielded, too."""
    members: dict[str, list[str]] = {}
    for path in paths:
        members.setdefault(_fused_with(path)[0], []).append(path)
    yield from members.values()


def split_set(plan: LayerPlan) -> list[str]:
    """Return linears that an engine fuses into one although they are stored differently; empty if there are none."""
    for paths in fused_sets((*plan.formats, *plan.left_out)):
        if len({plan.formats.get(path) for path in paths}) > 1:
            return paths
    return []


def stored_plan(quantization: Mapping[str, Any]) -> LayerPlan:
    """Return the linears that a `quantization_config` of compressed-tensors or bitsandbytes names one by one.

    Groups that name a class or a pattern are no part of it.
    """
    formats = {}
    for group in (quantization.get("config_groups") or {}).values():
        scheme = json.dumps({key: value for key, value in group.items() if key != "targets"}, sort_keys=True)
        formats |= dict.fromkeys(filter(_is_path, group.get("targets") or ()), scheme)
    skipped = [name for name in quantization.get("llm_int8_skip_modules") or () if _is_path(name)]
    for path in skipped:  # bitsandbytes does not name the others
        formats |= dict.fromkeys(set(_fused_with(path)) - set(skipped), "bitsandbytes")
    left_out = [name for name in quantization.get("ignore") or () if _is_path(name)]
    return LayerPlan(formats, (*left_out, *skipped))


def _is_path(target: str) -> bool:
    return "." in target and not target.startswith(spelling.REGEX)


def skipped_modules(plan: LayerPlan) -> list[str]:
    """Return what a plan leaves out as bitsandbytes names it: whole modules such as `….mlp` where nothing else is left.

    vLLM fuses linears, and finds what was left out by the names of the modules around them. Names of whole blocks do
    not do: transformers takes "layers.1" for a part of "layers.10".
    """
    skipped = []
    for path in plan.left_out:
        parent = path.rpartition(".")[0]
        is_block = parent.rpartition(".")[2].isdigit()
        holds_codes = any(other.startswith(f"{parent}.") for other in plan.formats)
        skipped.append(path if is_block or holds_codes else parent)
    return list(dict.fromkeys(skipped))
