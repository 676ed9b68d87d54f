"""`pagewire top`, the live view of a running deployment; `command.main` runs it."""
