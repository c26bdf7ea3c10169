"""Who samples completions: TRL's link to the engine, the weights sent to it, and how far it is from the trained model."""
