"""`gpuscalectl`: the command line over the gateway's one address."""
