"""An estimate in JSON documents and in MLflow metrics, the same way in every table."""

from qrl.stats import Estimate


def numbers(value: Estimate) -> dict[str, float]:
    """Return an estimate as JSON."""
    return {"estimate": value.estimate, "stderr": value.stderr, "low": value.low, "high": value.high}


def numbers_or_null(value: Estimate | None) -> dict[str, float] | None:
    """Return an estimate as JSON, null where it is not defined."""
    return None if value is None else numbers(value)


def with_ends(key: str, value: Estimate, *fields: str) -> dict[str, float]:
    """Return an estimate, the ends of its interval and further `fields` of it, such as "stderr", as metrics."""
    metrics = {key: value.estimate}
    for name in (*fields, "low", "high"):
        metrics[f"{key}_{name}"] = getattr(value, name)
    return metrics
