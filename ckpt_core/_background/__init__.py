"""Work in threads of its own, and the end of the interpreter."""
