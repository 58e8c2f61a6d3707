"""The fleet: takes in every agent's stream and knows every node from it."""
