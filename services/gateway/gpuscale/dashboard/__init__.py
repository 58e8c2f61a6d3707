"""The dashboard: a live view of the services in a browser. It reads the gateway like any other client.

`feed` fills `facts`; `rows` and `charts` turn them into tables and charts (pure, used by the terminal too); `frame` holds what all
`pages` share; `visitors` handles sign-in; `web` and `main` serve. All calls go through `gpuscale.client`.
"""
