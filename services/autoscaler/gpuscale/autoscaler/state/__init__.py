"""What is on disk: endpoints, replicas, decisions, watchers, history. Only here is SQL. Begin with `store`."""
