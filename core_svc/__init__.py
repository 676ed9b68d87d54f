"""The brain: schedules requests onto workers, step by step. No torch, no transformers."""
