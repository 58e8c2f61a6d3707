"""Replicas as containers of a Docker-compatible engine on one node. Begin with `engine`; `pulls` gets images.

`template` (the request) and `containers` (ownership and state) are pure; only `docker_api` imports the library.
"""
