"""The dashboard: what the services know, in a browser, live. It reads the gateway as any other client does."""
