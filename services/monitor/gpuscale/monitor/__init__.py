"""The monitor room: the agent that reads one host, and the fleet that all agents stream to."""
