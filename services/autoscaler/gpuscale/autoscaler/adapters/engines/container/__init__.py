"""Replicas as containers of a Docker-compatible engine on one node. Begin with `engine`.

`containers` (the request, ownership and state) is pure; only `docker_api` imports the library.
"""
