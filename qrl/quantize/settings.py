"""The settings that decide how a scheme stores weights, and a digest of them.

Most schemes use only some settings of the recipe's section `quantize`. The tables say which: `CHOICES` is what the
recipe chooses for whom, `FIXED_GROUP`, `SYMMETRIC` and `GPTQ` are what a format defines. `settings_of` fills in a
scheme's settings from both and leaves the others None, so that a setting without effect changes no digest.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qrl import names, process
from qrl.errors import BadInput
from qrl.formats import groups
from qrl.recipe import Quantize, Recipe, rules
from qrl.recipe import layers as spelling

TASK, ROLLOUTS = "task", "rollouts"  # sources of calibration texts; anything else is a file
GPTQ = {names.GPTQ: None, names.GPTQ_INT3: 3, names.GPTQ_INT2: 2}  # bits; None: the recipe chooses
# Schemes that scale activations by calibrated numbers; their weights do not depend on the texts.
SCALED = (names.NVFP4, names.FP8_STATIC, names.W8A8_STATIC)
ROUNDED_SCALED = tuple(f"{names.ROUNDED_PREFIX}{name}" for name in names.CALIBRATED_FORMATS)
SEARCHED = (names.AWQ, names.AWQ_CT, *GPTQ, names.AUTOROUND)  # choose weights by the texts
CALIBRATED = (*SEARCHED, *SCALED, *ROUNDED_SCALED)  # use calibration texts
GROUPED_ROUNDED = tuple(f"{names.ROUNDED_PREFIX}{name}" for name in names.GROUPED_FORMATS)
# The recipe chooses the size.
GROUPED = (names.AWQ, names.AWQ_CT, *GPTQ, names.W8A16, names.AUTOROUND, names.SPINQUANT, *GROUPED_ROUNDED)
FIXED_GROUP = {  # part of the format
    **dict.fromkeys((names.NVFP4, names.NVFP4A16), 16),
    **dict.fromkeys((names.MXFP4A16, names.MXFP8), 32),
    **dict.fromkeys((names.FP8_BLOCK, names.W4AFP8), 128),
}
OUTPUTS = {names.AWQ: 8, names.FP8_BLOCK: 128}  # that share an int32 of AutoAWQ's codes, or a scale
BITS = (names.AWQ_CT, names.GPTQ)  # the recipe chooses the bits
SYMMETRIC = {names.AWQ_CT: False, **dict.fromkeys((*GPTQ, names.W8A16, names.SPINQUANT), True)}  # defaults
# AutoAWQ names linears within a block, so it cannot leave out a block; int8-attention has linears of its own.
LAYERED = tuple(name for name in names.QUANTIZED_SCHEMES if name not in rules.OF_ALL_LAYERS)
# Schemes beside which llm-compressor stores scales of keys and values; AutoRound's own loop does not calibrate them.
KV_SCALED = tuple(name for name in (*names.COMPRESSED, *names.ROUNDED) if name != names.AUTOROUND)
# Field of the recipe → schemes that use it.
CHOICES = {
    "bits": BITS,
    "group_size": GROUPED,
    "symmetric": tuple(SYMMETRIC),
    "calibration": CALIBRATED,
    "format": (names.RTN_FILE,),
    "layers": LAYERED,
    "kv_cache": KV_SCALED,
}
LIBRARIES = {
    **dict.fromkeys(names.BITSANDBYTES, ("bitsandbytes",)),
    names.AWQ: ("autoawq",),
    **dict.fromkeys((*names.COMPRESSED, *names.ROUNDED), ("llmcompressor", "compressed-tensors")),
    names.AUTOROUND: ("llmcompressor", "compressed-tensors", "auto-round"),
}


@dataclass(frozen=True)
class Settings:
    """How a scheme is applied; None where the scheme leaves no choice."""

    scheme: str
    bits: int | None
    group_size: groups.GroupSize | None  # input channels that share a scale; `auto` until `sized` has seen the model
    symmetric: bool | None  # no zero points
    calibration: str | None  # "task", "rollouts" or a file
    samples: int | None  # calibration texts
    max_tokens: int | None  # longest calibration text
    seed: int  # of calibration questions and of everything random
    format: str | None = None  # a file
    layers: tuple[str, ...] = ()  # the terms of `recipe.layers`; none for all linears but the head
    layers_group_size: groups.GroupSize | None = None  # of formats in `layers` that leave it to the recipe
    kv_cache: str | None = None  # "fp8": scales of keys and values are calibrated and stored, too

    @property
    def rounding(self) -> str:
        """The format of a scheme of `names.ROUNDED`, as `rounding.scheme` reads it."""
        return self.format or self.scheme.removeprefix(names.ROUNDED_PREFIX)

    def sized(self, source: Path) -> "Settings":
        """Return the settings with the group size that fits a checkpoint, if it is left to that."""
        is_left_to_model = groups.AUTO in (self.group_size, self.layers_group_size)
        return self.with_groups(groups.of(source, groups.AUTO)) if is_left_to_model else self

    def with_groups(self, size: int) -> "Settings":
        """Return the settings with a group size, if it is left to the model."""
        group_size = size if self.group_size == groups.AUTO else self.group_size
        layers_group_size = size if self.layers_group_size == groups.AUTO else self.layers_group_size
        return replace(self, group_size=group_size, layers_group_size=layers_group_size)

    @property
    def uses_texts(self) -> bool:
        """Whether calibration texts have an effect."""
        return self.scheme in CALIBRATED or self.kv_cache is not None

    @property
    def own_format(self) -> str:
        """The name of the format that linears have where `layers` names no other."""
        return self.rounding if self.scheme in names.ROUNDED else self.scheme

    def shown(self) -> dict[str, Any]:
        """Return the settings as a run's params show them; those on layers only where there are any."""
        settings = asdict(self)
        if not self.layers:
            del settings["layers"], settings["layers_group_size"]
        if self.kv_cache is None:
            del settings["kv_cache"]
        return settings

    def covered(self) -> dict[str, Any]:
        """Return the settings as digests and keys cover them: a format by its content, and nothing where there is none.

        Digests from before there were such files, layers, scales of keys and values, or other groups than those of 128
        under rtn-*, stay valid.

        Raises:
            ValueError: the group size is still left to the model.
        """
        if groups.AUTO in (self.group_size, self.layers_group_size):
            raise ValueError("no model has decided the group size: call `sized`, or `with_groups`")
        settings = asdict(self)
        if self.scheme in GROUPED_ROUNDED and self.group_size == groups.USUAL:
            settings["group_size"] = None
        if self.kv_cache is None:
            del settings["kv_cache"]
        file = settings.pop("format")
        if file is not None:
            settings["format"] = process.file_digest(file)
        layers = spelling.text_of(settings.pop("layers"))
        layers_group_size = settings.pop("layers_group_size")
        if layers:
            settings["layers"] = layers
        if layers_group_size is not None:
            settings["layers_group_size"] = layers_group_size
        return settings

    def digest(self, questions: str | None) -> str:
        """Return the sha256 of the settings, the versions of the libraries, and the calibration questions.

        Args:
            questions: `calibration.digest` of a file's texts, or the digest of the questions that texts are made from;
                None for a scheme without calibration.
        """
        settings = self.covered()
        if self.calibration not in (None, TASK, ROLLOUTS):
            settings["calibration"] = "file"  # identified by its content, not its path
        libraries = {name: process.installed(name) for name in LIBRARIES[self.scheme]}
        text = json.dumps({"settings": settings, "libraries": libraries, "questions": questions}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def settings_of(scheme: str, recipe: Quantize, seed: int) -> Settings:
    """Return the settings of a scheme in a recipe's section.

    Args:
        scheme: one of `names.QUANTIZED_SCHEMES`.
        recipe: the section `quantize`.
        seed: the recipe's, where the section has none of its own.

    Raises:
        BadInput: the scheme is unknown, or its environment cannot make the calibration texts.
    """
    if scheme not in names.QUANTIZED_SCHEMES:
        raise BadInput(
            f"There is no scheme '{scheme}' to quantize to{names.scheme_hint(scheme)}: expected one of "
            f"{', '.join(names.QUANTIZED_SCHEMES)}."
        )
    # A command may name a scheme that is not one of the recipe's.
    rules.check(Recipe(quantize=recipe.model_copy(update={"schemes": (scheme,)})), rules.QUANTIZING)

    def recipe_choice(name: str) -> Any:
        return getattr(recipe, name) if scheme in CHOICES[name] else None

    bits = recipe_choice("bits")
    group_size = recipe_choice("group_size")
    symmetric = recipe_choice("symmetric")
    layers = recipe_choice("layers") or ()
    kv_cache = recipe_choice("kv_cache")
    stores_kv_scales = kv_cache not in (None, "auto")
    is_calibrated = scheme in CALIBRATED or stores_kv_scales
    return Settings(
        scheme,
        bits=GPTQ.get(scheme) if bits is None else bits,
        group_size=FIXED_GROUP.get(scheme) if group_size is None else group_size,
        symmetric=SYMMETRIC.get(scheme) if symmetric is None else symmetric,
        calibration=recipe.calibration if is_calibrated else None,
        samples=recipe.calibration_samples if is_calibrated else None,
        max_tokens=recipe.calibration_max_tokens if is_calibrated else None,
        seed=seed if recipe.calibration_seed is None else recipe.calibration_seed,
        format=recipe_choice("format"),
        layers=layers,
        layers_group_size=recipe.group_size if spelling.has_groups(layers) else None,
        kv_cache=kv_cache if stores_kv_scales else None,
    )


def unheeded(
    recipe: Quantize, schemes: Sequence[str], typed: Collection[str], beside: Sequence[str] = (), qat: str = "none"
) -> list[str]:
    """Return a warning for each setting that some of these schemes ignore.

    Args:
        recipe: the section `quantize`.
        schemes: schemes to quantize with it.
        typed: keys that the user set beside the recipe; typing other schemes may make a recipe's own setting
            irrelevant.
        beside: schemes that the study adds by itself and that may use a setting.
        qat: the format that the study trains in, which has groups of the same size.

    Raises:
        BadInput: none of the schemes uses a setting.
    """
    warnings = []
    choices = dict(CHOICES)
    if recipe.kv_cache != Quantize.model_fields["kv_cache"].default:  # its scales come from the same texts
        choices["calibration"] = tuple(dict.fromkeys((*CALIBRATED, *KV_SCALED)))
    for name, users in choices.items():
        value, key = getattr(recipe, name), f"quantize.{name}"
        ignoring = [scheme for scheme in schemes if scheme not in users]
        if value == Quantize.model_fields[name].default or not ignoring:
            continue
        using = [scheme for scheme in (*schemes, *beside) if scheme in users]
        if name == "group_size" and qat in names.GROUPED_FORMATS:
            using.append(f"train.qat={qat}")
        if name == "group_size" and spelling.has_groups(recipe.layers):
            using.append(f"quantize.layers={spelling.text_of(recipe.layers)}")
        if not using and (key in typed or "quantize.schemes" not in typed):
            raise BadInput(
                f"{key} = {value} has no effect on {', '.join(ignoring)}: leave it out, or add a scheme that uses it "
                f"({', '.join(users)})."
            )
        ignored_by = ignoring
        if name == "group_size":
            ignored_by = [_with_fixed_group(scheme) for scheme in ignoring]
        subject = f"{_and(ignored_by)} {'has' if len(ignoring) == 1 else 'have'}"
        warnings.append(f"{key} = {value} is for {_and(using) or 'other schemes'}; {subject} no such setting.")
    return warnings


def _with_fixed_group(scheme: str) -> str:
    """Return a scheme with the size of its groups where that is part of its format: `nvfp4 (always groups of 16)`."""
    size = FIXED_GROUP.get(scheme)
    return f"{scheme} (always groups of {size})" if size else scheme


def _and(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: `a`, `a and b`, `a, b and c`; empty without words."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
