"""The fleet: takes in every agent's stream; history, recording, health observe `nodes.Nodes`. Begin with `nodes`."""
