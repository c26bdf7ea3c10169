"""What goes wrong in GRPO while every loss looks fine, said in a sentence while there is still time.

Watchers see the rows that a trainer logs and the outcomes of probes, nothing else, so that a resumed training, which has them
from its checkpoint, knows what the interrupted one knew. Each speaks once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from qrl import stats
from qrl.recipe import Rollout, Watch


@dataclass(frozen=True)
class Alarm:
    """What one watcher says, once."""

    watcher: str  # entropy, signal, kl, truncation, probe or rollout
    step: int
    sentence: str


class Watchers:
    """The state of a training as its watchers see it."""

    def __init__(self, settings: Watch, rollout: Rollout = Rollout()) -> None:
        self.settings = settings
        self.rollout = rollout
        self.rows: list[dict] = []
        self.probes: list[tuple[int, list[int]]] = []
        self.raised: dict[str, Alarm] = {}

    def see(self, row: dict) -> list[Alarm]:
        """What is new after a row of the trainer's log.

        Args:
            row: `step` and TRL's metrics, or `probe` with the outcomes 0 or 1 of the probe's questions; others pass by.
        """
        if "probe" in row:
            self.probes.append((row["step"], row["probe"]))
            return self._new({"probe": self._probe()}, row["step"])
        if "reward" not in row:
            return []
        self.rows.append(row)
        alarms = self._new({"rollout": self._rollout(row)}, row["step"])
        if len(self.rows) < self.settings.window:
            return alarms
        last, first = self.rows[-self.settings.window :], self.rows[: self.settings.window]
        found = {
            "entropy": self._entropy(first, last),
            "signal": self._signal(last),
            "kl": self._kl(last),
            "truncation": self._truncation(last),
        }
        return alarms + self._new(found, row["step"])

    def stop(self, alarms: Sequence[Alarm]) -> Alarm | None:
        """The first of these that the recipe stops for."""
        return next((alarm for alarm in alarms if alarm.watcher in self.settings.stop), None)

    def _new(self, found: dict[str, str | None], step: int) -> list[Alarm]:
        alarms = [Alarm(name, step, text) for name, text in found.items() if text and name not in self.raised]
        self.raised |= {alarm.watcher: alarm for alarm in alarms}
        return alarms

    def _entropy(self, first: list[dict], last: list[dict]) -> str | None:
        start, now = _mean(first, "entropy"), _mean(last, "entropy")
        if not all(row.get("entropy", math.nan) < self.settings.min_entropy_share * start for row in last):
            return None
        return (
            f"Entropy has collapsed: {now:.3g} nats a token over {_steps(last)}, {start:.3g} over {_steps(first)} (below "
            f"watch.min_entropy_share = {self.settings.min_entropy_share:g} of it): completions of a group are becoming alike; "
            "lower train.learning_rate, or raise train.beta or train.epsilon_high."
        )

    def _signal(self, last: list[dict]) -> str | None:
        if not all(row.get("frac_reward_zero_std", 0) >= 1 for row in last):
            return None
        reward = _mean(last, "reward")
        why = "too hard or never in the asked form" if reward <= 0 else "too easy" if reward >= 1 else "answered alike"
        return (
            f"No signal: in {_steps(last)} every group's completions earned the same (mean reward {reward:.3g}), so no gradient "
            f"came of them: the questions are {why}; change the questions, the prompt or train.temperature."
        )

    def _kl(self, last: list[dict]) -> str | None:
        if not all(row.get("kl", math.nan) > self.settings.max_reference_kl for row in last):
            return None
        now = _mean(last, "kl")
        return (
            f"KL is running away: {now:.3g} nats a token from the reference over {_steps(last)}, above watch.max_reference_kl = "
            f"{self.settings.max_reference_kl:g}: raise train.beta or lower train.learning_rate."
        )

    def _truncation(self, last: list[dict]) -> str | None:
        if not all(row.get("completions/clipped_ratio", math.nan) > self.settings.max_truncation for row in last):
            return None
        now = _mean(last, "completions/clipped_ratio")
        return (
            f"Completions are cut: {now:.3g} of those of {_steps(last)} reached train.max_completion_tokens, above "
            f"watch.max_truncation = {self.settings.max_truncation:g}: what is cut earns nothing; raise train.max_completion_tokens."
        )

    def _rollout(self, row: dict) -> str | None:
        """Whether the engine that samples is further from the trained model than the recipe allows, in this very step."""
        kl, share = (row.get(f"rollout/{name}", math.nan) for name in ("kl_k3", "token_ess"))
        if not (kl > self.rollout.max_engine_kl or share < self.rollout.min_effective_sample_size):
            return None
        fp8 = [key for key in ("quantization", "kv_cache") if getattr(self.rollout, key) == "fp8"]
        return (
            f"The rollout engine samples from another distribution than the one that is trained: KL {kl:.2g} nats a token "
            f"(rollout.max_engine_kl {self.rollout.max_engine_kl:g}), effective sample size {share:.2f} of the tokens "
            f"(rollout.min_effective_sample_size {self.rollout.min_effective_sample_size:g}): "
            f"{f'leave rollout.{fp8[-1]} = fp8 out' if fp8 else 'lower train.learning_rate'}, or watch the reward."
        )

    def _probe(self) -> str | None:
        """Whether the reward rose while the accuracy on the probe fell, by a paired interval that lies below 0."""
        window = self.settings.window
        if len(self.probes) < 2 or len(self.rows) < 2 * window:
            return None
        (since, first), (_, now) = self.probes[0], self.probes[-1]
        change = stats.contrast([now, first], (1, -1))
        start, end = _mean(self.rows[:window], "reward"), _mean(self.rows[-window:], "reward")
        if not (change.high < 0 and end > start):
            return None
        return (
            f"The reward rises and held-out accuracy falls: reward {start:.3f} over {_steps(self.rows[:window])}, {end:.3f} over "
            f"{_steps(self.rows[-window:])}; accuracy on the n = {len(now)} probe questions {stats.signed(change.estimate)} "
            f"[{stats.signed(change.low)}, {stats.signed(change.high)}] since step {since}: the reward is earned by something else than "
            "right answers; read the sampled completions."
        )


def _mean(rows: list[dict], name: str) -> float:
    """Mean over rows; not a number, with which every comparison is false, where a row lacks it."""
    return mean(row.get(name, math.nan) for row in rows)


def _steps(rows: list[dict]) -> str:
    return f"steps {rows[0]['step']} to {rows[-1]['step']}" if len(rows) > 1 else f"step {rows[0]['step']}"
