"""The gateway: one address for every service, forwarding bytes to where each of them runs."""
