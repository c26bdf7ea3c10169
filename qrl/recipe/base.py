"""What every section of a recipe is built on: checked, frozen fields, and a mark for those that no cache key covers."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True)
class NotInKey:
    """A mark on a field that cannot change a step's result, so that no cache key covers it.

    `NotInKey()` always applies; `NotInKey("samples", 1)` applies while the section's field `samples` is 1.
    """

    field: str = ""
    value: object = None


@dataclass(frozen=True)
class Judges:
    """A mark on a field that judges a cell's answers and changes none: the answers' key leaves it out."""


NO_KEY = NotInKey()
JUDGES = Judges()
_Value = TypeVar("_Value")
NoKey = Annotated[_Value, NO_KEY]
Limit = Annotated[Fraction, JUDGES]
Selection = Annotated[Literal["random", "first"], NotInKey("selection", "random")]  # which questions of a split


class Section(BaseModel):
    """Fields that are checked, known by name, and never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    def in_key(self, *, judging: bool = True) -> list[str]:
        """Return the names of the fields that a cache key covers; without `judging`, none that only judges answers."""
        covered = []
        for name, field in type(self).model_fields.items():
            left_out = JUDGES in field.metadata and not judging
            if not left_out and not any(map(self._marked, field.metadata)):
                covered.append(name)
        return covered

    def _marked(self, mark: object) -> bool:
        """Whether this is a `NotInKey` that holds for the present values."""
        return isinstance(mark, NotInKey) and (not mark.field or getattr(self, mark.field) == mark.value)


# torch.compile costs 15 s or more at each start of an engine, and makes answers some 10 % faster; engines write 20,000
# to 60,000 tokens a second. Below this many tokens the start costs more than it saves.
WORTH_COMPILING_TOKENS = 5_000_000


def compiles(choice: bool | None, tokens: int) -> bool:
    """Return whether vLLM compiles a model: as chosen, or by the number of tokens, at most, that it will write."""
    return tokens >= WORTH_COMPILING_TOKENS if choice is None else choice


def option(default: Any, description: str, **bounds: Any) -> Any:
    """Return a field with a default, the help text of its option, and pydantic's bounds."""
    return Field(default=default, description=description, **bounds)


def one_of(names: tuple[str, ...], or_file: str) -> AfterValidator:
    """Return a validator of a name of ours, or of a user's file: FILE.py alone, or with `:` and a name in it."""
    pattern = re.escape(or_file).replace("FILE", r".*[^/]").replace("FUNCTION", r"[^\W\d]\w*")

    def check(value: str) -> str:
        if value not in names and not re.fullmatch(pattern, value):
            raise ValueError(f"must be {', '.join(names)} or {or_file}")
        return value

    return AfterValidator(check)


def once(what: str, *, at_least_one: bool = False) -> AfterValidator:
    """Return a validator of a tuple that names each value once; `what` is the value's name in the error."""
    rule = f"must name at least one {what}, and each once" if at_least_one else f"must name each {what} once"

    def check(values: tuple) -> tuple:
        if len(values) < at_least_one or len(set(values)) < len(values):
            raise ValueError(rule)
        return values

    return AfterValidator(check)
