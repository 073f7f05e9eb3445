"""Rollout engine against trainer: log-probs of the same tokens compared, and the cause found when they differ."""
