"""The demo: its facts, its picture, what it shows, and the command itself on real processes."""
