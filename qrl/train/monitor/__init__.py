"""Watch a training as it runs: live metrics, watchers that warn or stop, a held-out probe, sampled completions."""
