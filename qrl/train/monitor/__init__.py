"""What is watched while a model trains: live metrics, watchers, a held-out probe, sampled completions."""
