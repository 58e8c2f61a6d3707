"""Replicas as containers of a Docker-compatible engine on one node. Begin with `engine`; `pulls` gets images.

`template` (what is asked for) and `containers` (what is ours, and how it stands) are pure; `docker_api` alone knows the library.
"""
