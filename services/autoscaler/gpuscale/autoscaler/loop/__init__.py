"""The loop that makes endpoints what they should be; only here is anybody told something. Begin with `reconciler`."""
