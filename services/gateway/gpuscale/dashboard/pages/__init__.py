"""The pages, one function each, by topic. What they show is made in `rows` and `charts`; `web` says where each is served."""
