"""The state on disk: endpoints, replicas, decisions, watchers, history. Only this package uses SQL. Begin with `store`."""
