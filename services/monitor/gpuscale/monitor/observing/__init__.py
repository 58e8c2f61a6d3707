"""What the fleet makes of the snapshots that it takes in: samples for history and recordings, facts for health.

The rules are in `history`, `recording` and `health`, which are pure; here they meet the stream and the callers. Begin with
`samples` and `health_servicer`.
"""
