"""What a job tells about itself: one catalogue, the agent's registry, and the endpoint that serves it."""
