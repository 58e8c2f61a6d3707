"""Who calls and what that caller may do: tokens, certificates, roles, and the audit log.

Nothing here serves RPCs. Begin with `auth`.
"""
