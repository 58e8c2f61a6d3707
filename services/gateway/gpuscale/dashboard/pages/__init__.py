"""The pages, one function each, by topic. `rows` and `charts` compute what they show; `web` maps paths to them."""
