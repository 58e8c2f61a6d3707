"""Who calls and what that caller may do: tokens, certificates, roles.

Nothing here serves RPCs. Begin with `auth`.
"""
