"""Manifests: YAML that knows its lines, the resources it declares, and the steps of `apply`.

Begin with `documents`; only `planning` calls a server.
"""
