"""The agent: reads the GPUs and the host it runs on, answers for them, and streams them to the fleet."""
