"""What every room stands on: server, channel, lifecycle, errors, settings, store, logs. No business words."""
