"""Pure functions on tensors; they know nothing of requests."""
