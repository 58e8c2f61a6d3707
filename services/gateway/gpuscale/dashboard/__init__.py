"""The dashboard: what the services know, in a browser, live. It reads the gateway as any other client does.

`feed` fills the `facts`; `rows` and `charts` say what is shown of them (pure, and for the terminal too); `frame` is what all `pages`
share; `visitors` lets people in; `web` and `main` serve. Nothing here calls a room except through `gpuscale.client`.
"""
