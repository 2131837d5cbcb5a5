"""What `hieravg doctor` looks at: facts are gathered at the edges, and judged by small pure functions."""
