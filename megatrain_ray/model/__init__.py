"""Opens the model that a configuration names and describes it to the engine."""
