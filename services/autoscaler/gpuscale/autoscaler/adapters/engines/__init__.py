"""Built-in engines, one package each; begin with its `engine`. None imports another, or a library at the top of `engine`."""
