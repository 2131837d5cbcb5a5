"""The averaging engine: rounds over the groups of a plan, exact, weighted and safe."""
