"""SGLang as a rollout engine: the only place that imports it."""
