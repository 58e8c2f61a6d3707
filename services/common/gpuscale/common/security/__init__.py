"""Authentication and authorization: tokens, certificates, roles. Nothing here serves RPCs. Begin with `auth`."""
