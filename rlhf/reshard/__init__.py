"""From two layouts of one model to a proved plan to moved bytes. Knows neither Megatron nor an engine."""
