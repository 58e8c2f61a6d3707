"""The programs and their settings. Only `up` imports them."""
