"""What the benchmarks have in common: how they report, and how their figures become the README's tables."""
