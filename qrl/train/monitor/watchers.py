"""Watchers for what goes wrong in GRPO while the loss looks fine; each warns once, in a sentence.

Watchers see only the rows that a trainer logs and the outcomes of probes. A checkpoint holds both, so a resumed
training knows what the interrupted one knew.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import mean

from qrl import stats
from qrl.recipe import Rollout, Watch
from qrl.train.job import Alarm

_K3, _EARLY, _LATE = (f"rollout/kl_k3{part}" for part in ("", "_first_quarter", "_last_quarter"))
_SEQUENCES = "rollout/sequence_ess"
_SMALL_GAP = 0.1  # share of rollout.max_engine_kl: growth below it is no trouble, since few tokens make it noisy


class Watchers:
    """The state of a training as its watchers see it."""

    def __init__(self, settings: Watch, rollout: Rollout = Rollout(), qat: str = "none") -> None:
        self.settings = settings
        self.rollout = rollout
        self.qat = qat
        self.rows: list[dict] = []
        self.probes: list[tuple[int, list[int]]] = []
        self.raised: set[str] = set()  # watchers that have warned

    def see(self, row: dict) -> list[Alarm]:
        """Return the new alarms after a row of the trainer's log.

        Args:
            row: `step` and TRL's metrics, or `probe` with an outcome, 0 or 1, per probe question; others are ignored.
        """
        if "probe" in row:
            self.probes.append((row["step"], row["probe"]))
            sentences = {"probe": self._probe()}
        elif "reward" in row:
            self.rows.append(row)
            sentences = {"rollout": self._rollout(row) or next(self._drift(), None), "resample": _resample(row)}
            sentences |= dict(self._lasting())
        else:
            return []
        new_sentences = {name: text for name, text in sentences.items() if text and name not in self.raised}
        self.raised |= set(new_sentences)
        return [Alarm(name, row["step"], text) for name, text in new_sentences.items()]

    def stop(self, alarms: Sequence[Alarm]) -> Alarm | None:
        """Return the first of these alarms that the recipe stops for."""
        return next((alarm for alarm in alarms if alarm.watcher in self.settings.stop), None)

    def _lasting(self) -> Iterator[tuple[str, str]]:
        """Yield each watcher's name and sentence for what has lasted over the whole window."""
        limits = self.settings
        first = self.rows[: limits.window]
        last = self.rows[-limits.window :]
        if len(last) < limits.window:
            return
        first_entropy = _mean(first, "entropy")
        if all(row.get("entropy", math.nan) < limits.min_entropy_share * first_entropy for row in last):
            yield (
                "entropy",
                f"Entropy has collapsed: {_mean(last, 'entropy'):.3g} nats per token over {_steps(last)}, "
                f"{first_entropy:.3g} over {_steps(first)}; its share is below watch.min_entropy_share = "
                f"{limits.min_entropy_share:g}. The "
                "completions of a group are becoming the same: lower train.learning_rate, or raise train.beta or "
                "train.epsilon_high.",
            )
        if "kept_completions" in last[-1]:  # of rejection sampling, where a group of right answers has a gradient
            if not any(row.get("kept_completions") for row in last):
                yield (
                    "signal",
                    f"No training signal: in {_steps(last)} no completion earned enough to be kept (mean reward "
                    f"{_mean(last, 'reward'):.3g}), so there was no gradient: the questions are too hard, no answer "
                    "has the required form, or train.min_kept_reward is too high. Change the questions, the prompt or "
                    "train.temperature.",
                )
        elif all(row.get("frac_reward_zero_std", 0) >= 1 for row in last):
            reward = _mean(last, "reward")
            if reward >= 1:
                cause = "the questions are too easy"
            elif reward <= 0:
                cause = "the questions are too hard, or no answer has the required form"
            else:
                cause = "the answers within a group do not differ"
            yield (
                "signal",
                f"No training signal: in {_steps(last)} all completions of each group earned the same (mean reward "
                f"{reward:.3g}), so there was no gradient: {cause}. Change the questions, the prompt or "
                "train.temperature.",
            )
        if all(row.get("kl", math.nan) > limits.max_reference_kl for row in last):
            yield (
                "kl",
                f"The KL to the reference is too large: {_mean(last, 'kl'):.3g} nats per token over {_steps(last)}, "
                f"above watch.max_reference_kl = {limits.max_reference_kl:g}: raise train.beta or lower "
                "train.learning_rate.",
            )
        name = "completions/clipped_ratio"
        if all(row.get(name, math.nan) > limits.max_truncation for row in last):
            yield (
                "truncation",
                f"Too many completions are truncated: {_mean(last, name):.3g} of those in {_steps(last)} reached "
                f"train.max_completion_tokens, above watch.max_truncation = {limits.max_truncation:g}. A truncated "
                "completion earns nothing: raise train.max_completion_tokens.",
            )

    def _rollout(self, row: dict) -> str | None:
        """Compare the engine's gap to the trained model, in this step alone, with the recipe's limits."""
        kl = row.get("rollout/kl_k3", math.nan)
        share = row.get("rollout/token_ess", math.nan)
        if not (kl > self.rollout.max_engine_kl or share < self.rollout.min_effective_sample_size):
            return None
        return (
            f"The rollout engine samples from another distribution than the trained model's: KL {kl:.2g} nats per "
            f"token (limit: rollout.max_engine_kl = {self.rollout.max_engine_kl:g}), effective sample size {share:.2f} "
            f"of the tokens (limit: rollout.min_effective_sample_size = {self.rollout.min_effective_sample_size:g}): "
            f"{self._remedy()}, or watch the reward."
        )

    def _drift(self) -> Iterator[str]:
        """Yield a sentence for each way in which the gap has grown, or has weakened whole completions, over the window.

        Training in bf16 with rollouts in FP8 collapsed on completions of 8 K tokens and more (arXiv 2601.14243), where
        the gap of a single token is small: what it does to a whole completion adds up.
        """
        limits = self.rollout
        window = self.settings.window
        first = self.rows[:window]
        last = self.rows[-window:]
        if len(last) < window:
            return
        first_gap = _mean(first, _K3)

        def has_grown(row: dict, name: str, reference: float) -> bool:
            gap = row.get(name, math.nan)
            return gap > _SMALL_GAP * limits.max_engine_kl and gap > limits.max_gap_growth * reference

        limit = f"more than rollout.max_gap_growth = {limits.max_gap_growth:g} times as much"
        if all(has_grown(row, _LATE, row.get(_EARLY, math.nan)) for row in last):
            yield (
                f"The rollout engine's gap to the trained model grows along completions: KL {_mean(last, _LATE):.2g} "
                f"nats per token in their last quarter, {_mean(last, _EARLY):.2g} in their first, over {_steps(last)}: "
                f"{limit}. Training on long completions may collapse: {self._remedy()}, or lower "
                "train.max_completion_tokens."
            )
        if all(has_grown(row, _K3, first_gap) for row in last):
            yield (
                f"The rollout engine's gap to the trained model grows over steps: KL {_mean(last, _K3):.2g} nats per "
                f"token over {_steps(last)}, {first_gap:.2g} over {_steps(first)}: {limit}. Training may collapse: "
                f"{self._remedy()}, or watch the reward."
            )
        if all(row.get(_SEQUENCES, math.nan) < limits.min_sequence_ess for row in last):
            yield (
                f"Few of the completions count: their effective sample size is {_mean(last, _SEQUENCES):.2f} of them "
                f"over {_steps(last)}, below rollout.min_sequence_ess = {limits.min_sequence_ess:g}, since the "
                f"engine's gap adds up over their tokens. Training may collapse: {self._remedy()}, or lower "
                "train.max_completion_tokens."
            )

    def _remedy(self) -> str:
        fp8 = [key for key in ("quantization", "kv_cache") if getattr(self.rollout, key) == "fp8"]
        if fp8:
            return f"leave rollout.{fp8[-1]} = fp8 out"
        if self.qat != "none":
            return f"train in another format than {self.qat}, or set rollout.engine = transformers"
        return "lower train.learning_rate"

    def _probe(self) -> str | None:
        """Alarm if the reward rises while the probe's accuracy falls: its paired interval must be below 0."""
        window = self.settings.window
        if len(self.probes) < 2 or len(self.rows) < 2 * window:
            return None
        first_step, first_outcomes = self.probes[0]
        _, latest_outcomes = self.probes[-1]
        change = stats.contrast([latest_outcomes, first_outcomes], (1, -1))
        first = self.rows[:window]
        last = self.rows[-window:]
        first_reward = _mean(first, "reward")
        last_reward = _mean(last, "reward")
        if not (change.high < 0 and last_reward > first_reward):
            return None
        return (
            f"The reward rises while held-out accuracy falls: reward {first_reward:.3f} over {_steps(first)}, "
            f"{last_reward:.3f} over {_steps(last)}; accuracy on the n = {len(latest_outcomes)} probe questions "
            f"{stats.signed(change.estimate)} [{stats.signed(change.low)}, {stats.signed(change.high)}] since step "
            f"{first_step}. Something other than right answers earns the reward: read the sampled completions."
        )


def _resample(row: dict) -> str | None:
    flat_groups = row.get("flat_groups", 0)
    if not flat_groups:
        return None
    return (
        f"Resampling has reached its bound: in step {row['step']} the completions of {flat_groups:.0f} groups still "
        "earned the same, so they give no gradient: choose questions that the model answers sometimes, or raise "
        "train.max_resamples."
    )


def _mean(rows: list[dict], name: str) -> float:
    """Return the mean over rows; NaN, which no comparison passes, where a row lacks the metric."""
    return mean(row.get(name, math.nan) for row in rows)


def _steps(rows: list[dict]) -> str:
    return f"steps {rows[0]['step']} to {rows[-1]['step']}" if len(rows) > 1 else f"step {rows[0]['step']}"
