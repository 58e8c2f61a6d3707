"""Manifests: YAML with places, the resources that it declares, and the steps of `apply`.

Begin with `documents`; `planning` is the only module here that calls a server.
"""
