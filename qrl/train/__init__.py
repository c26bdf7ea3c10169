"""Training: GRPO with TRL, its reward, its checkpoints to resume from, and the merging of adapters."""
