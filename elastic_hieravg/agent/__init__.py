"""What runs once on every node: it starts and watches its own workers, and tells them of every generation."""
