"""What decides how a scheme stores weights: its settings, and a digest of them.

Two cells of one scheme may be compared where their digests are equal: same settings, same libraries, same calibration
questions. Only what means something to a scheme is part of its settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from qrl import names
from qrl.errors import BadInput
from qrl.recipe import Quantize

TASK, ROLLOUTS = "task", "rollouts"  # where calibration texts come from; anything else is a file
CALIBRATED = (names.AWQ, names.AWQ_CT, names.GPTQ, names.NVFP4, "rtn-nvfp4-a4")  # schemes that look at texts
GROUPED = (names.AWQ, names.AWQ_CT, names.GPTQ, names.W8A16)  # whose group size is ours to choose
FIXED_GROUP = {names.NVFP4: 16, names.NVFP4A16: 16, names.MXFP4A16: 32}  # part of the format
AWQ_WORD = 8  # outputs that share an int32 of AutoAWQ's codes
BITS = (names.AWQ_CT, names.GPTQ)  # whose bits are ours to choose
SYMMETRIC = {names.AWQ_CT: False, names.GPTQ: True, names.W8A16: True}  # each scheme's custom, and ours to choose
CHOICES = {
    "bits": BITS,
    "group_size": GROUPED,
    "symmetric": tuple(SYMMETRIC),
    "calibration": CALIBRATED,
}  # field → who heeds it
LIBRARIES = {
    **dict.fromkeys(names.BITSANDBYTES, ("bitsandbytes",)),
    names.AWQ: ("autoawq",),
    **dict.fromkeys((*names.COMPRESSED, *names.ROUNDED), ("llmcompressor", "compressed-tensors")),
}


@dataclass(frozen=True)
class Settings:
    """How a scheme is applied; None where the scheme leaves no choice."""

    scheme: str
    bits: int | None
    group_size: int | None  # input channels that share a scale
    symmetric: bool | None  # no zero points
    calibration: str | None  # "task", "rollouts" or a file
    samples: int | None  # calibration texts
    max_tokens: int | None  # of the longest one
    seed: int  # of calibration questions and of everything random

    def digest(self, questions: str | None) -> str:
        """sha256 over the settings, the versions of the libraries, and the calibration questions.

        Args:
            questions: `calibration.digest` of a file's texts, or the digest of the questions that texts are made from; None
                for a scheme that looks at none.
        """
        settings = asdict(self)
        if self.calibration not in (None, TASK, ROLLOUTS):
            settings["calibration"] = "file"  # by what it holds, not where it lies
        libraries = {name: _installed(name) for name in LIBRARIES[self.scheme]}
        text = json.dumps({"settings": settings, "libraries": libraries, "questions": questions}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def of(scheme: str, recipe: Quantize, seed: int) -> Settings:
    """The settings of a scheme in a recipe's section.

    Args:
        scheme: one of `names.QUANTIZED_SCHEMES`.
        recipe: the section `quantize`.
        seed: the recipe's, where the section names none of its own.

    Raises:
        BadInput: unknown scheme, or calibration texts that its environment cannot make.
    """
    if scheme not in names.QUANTIZED_SCHEMES:
        raise BadInput(
            f"There is no scheme '{scheme}' to quantize to: expected one of {', '.join(names.QUANTIZED_SCHEMES)}."
        )
    looks = scheme in CALIBRATED
    if scheme == names.AWQ and recipe.calibration == ROLLOUTS:
        raise BadInput(
            "Scheme awq runs in AutoAWQ's own environment, whose transformers cannot run the policy for its rollouts: "
            "use scheme awq-ct, or quantize.calibration=task."
        )
    return Settings(
        scheme=scheme,
        bits=recipe.bits if scheme in BITS else None,
        group_size=recipe.group_size if scheme in GROUPED else FIXED_GROUP.get(scheme),
        symmetric=_either(recipe.symmetric, SYMMETRIC[scheme]) if scheme in SYMMETRIC else None,
        calibration=recipe.calibration if looks else None,
        samples=recipe.calibration_samples if looks else None,
        max_tokens=recipe.calibration_max_tokens if looks else None,
        seed=_either(recipe.calibration_seed, seed),
    )


def unheeded(recipe: Quantize, schemes: Sequence[str], typed: Collection[str], beside: Sequence[str] = ()) -> list[str]:
    """What a section asks for and some of these schemes do not heed, a sentence a setting.

    Args:
        recipe: the section `quantize`.
        schemes: that are to be made with it.
        typed: keys that were given beside the recipe. A recipe's own setting may lose its meaning by the schemes that are typed.
        beside: schemes that nobody named and that are made with it too: one of them may be the one that heeds a setting.

    Raises:
        BadInput: something was asked for that none of them heeds.
    """
    told = []
    for name, heeding in CHOICES.items():
        value, key = getattr(recipe, name), f"quantize.{name}"
        deaf = [scheme for scheme in schemes if scheme not in heeding]
        if value == Quantize.model_fields[name].default or not deaf:
            continue
        means = f"{key} = {value} means nothing to {' and '.join(deaf)}"
        alone = [scheme for scheme in (*schemes, *beside) if scheme in heeding]
        if not alone and (key in typed or "quantize.schemes" not in typed):
            raise BadInput(
                f"{means}, whose name or library says it: leave it out, or take a scheme that heeds it ({', '.join(heeding)})."
            )
        told.append(f"{means}{': ' + ', '.join(alone) + ' alone heeds it' if alone else ', the only ones asked for'}.")
    return told


def _either(given, default):
    return default if given is None else given


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
