"""Long runs under faults; `make soak` runs them, `make test` does not."""
