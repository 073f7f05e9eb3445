"""Names, reductions, timers and sinks of what a run reports."""
