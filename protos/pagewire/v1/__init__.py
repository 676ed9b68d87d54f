"""Generated from the protos beside it; see `make protos`."""
