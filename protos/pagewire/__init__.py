"""The contract of Pagewire: pagewire.v1 (generated), its plain-Python vocabulary, and the runtime of every process."""
