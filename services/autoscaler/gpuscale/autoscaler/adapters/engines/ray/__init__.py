"""The Ray adapter: a replica is a command that an actor of a placement group runs."""
