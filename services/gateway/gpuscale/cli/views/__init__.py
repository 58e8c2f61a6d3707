"""What each kind of resource looks like: table columns, and lines of text. Nothing here calls a server or writes.

Modules are named for the service whose resources they show; `contract_docs` explains the fields of the contract.
"""
