"""Model implementations: native decoders, the generic path, and loading."""
