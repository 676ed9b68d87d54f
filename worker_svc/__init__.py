"""The muscle: runs the model with paged attention and samples."""
