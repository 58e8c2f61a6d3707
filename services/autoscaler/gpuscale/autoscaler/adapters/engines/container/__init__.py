"""Replicas as containers of a Docker-compatible engine on one node. Begin with `engine`; `docker_api` knows the library."""
